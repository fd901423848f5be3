import torch

from lightning_memopt.core.allocator_state import (
    Block,
    allocations_by_line,
    allocator_state,
    line_of,
)

TORCH = {"filename": f"{torch.__path__[0]}/nn/functional.py", "line": 3, "name": "linear"}
MODEL = {"filename": "/home/me/model.py", "line": 7, "name": "forward"}
TRAIN = {"filename": "/home/me/train.py", "line": 9, "name": "<module>"}
STACK = [TORCH, MODEL, TRAIN]


def block(address, size, state="active_allocated", frames=STACK):
    return {"address": address, "size": size, "state": state, "frames": frames}


def segment(*blocks, device=0, **kwargs):
    total = sum(each["size"] for each in blocks)
    return {"device": device, "total_size": total, "blocks": list(blocks), **kwargs}


def event(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def oom(size, free):
    return {"action": "oom", "size": size, "device_free": free, "frames": STACK}


def snapshot(segments, *traces):
    return {"segments": segments, "device_traces": [list(trace) for trace in traces]}


def test_without_a_failure_in_the_trace_the_state_is_that_of_the_snapshot():
    here = segment(block(0, 512), block(512, 1024, "inactive"))
    state = allocator_state(snapshot([here, segment(block(9, 64), device=1)], [], []), 0, None)
    assert [each.address for each in state.blocks] == [0]
    assert (state.allocated, state.reserved) == (512, 1536)
    assert state.requested is state.free is None


def test_what_was_freed_after_the_failure_is_there_again_with_its_line():
    trace = [
        event("alloc", 512, 1000, [MODEL]),
        event("alloc", 512, 1000, STACK),  # the address was used before
        oom(5000, free=77),
        event("free_requested", 512, 1000),
        event("free_completed", 512, 1000),
        event("segment_free", 4096, 2048),
    ]
    state = allocator_state(snapshot([segment(block(0, 512))], trace), 0, 5000)
    assert {each.address: each.size for each in state.blocks} == {0: 512, 512: 1024}
    assert state.blocks[1].stack == STACK
    assert (state.requested, state.free, state.reserved) == (5000, 77, 512 + 2048)


def test_what_was_allocated_after_the_failure_is_not_there():
    trace = [oom(5000, free=0), event("segment_alloc", 0, 512), event("alloc", 0, 512)]
    state = allocator_state(snapshot([segment(block(0, 512))], trace), 0, 5000)
    assert state.blocks == []
    assert state.reserved == 0


def test_the_last_failure_counts_and_only_if_it_is_the_errors_own():
    trace = [oom(100, free=1), oom(2**31, free=2)]
    # The text of an error is rounded.
    assert allocator_state(snapshot([], trace), 0, int(2.001 * 2**30)).free == 2
    assert allocator_state(snapshot([], trace), 0, None).free == 2
    assert allocator_state(snapshot([], trace), 0, 100).free is None


def test_sizes_are_added_up_by_the_innermost_line_that_is_not_plumbing():
    blocks = [Block(0, 10, STACK), Block(1, 20, STACK), Block(2, 25, [TRAIN]), Block(3, 1, [])]
    rows = allocations_by_line(blocks, {})
    assert [(row.line and row.line.number, row.size, row.count) for row in rows] == [
        (7, 30, 2),
        (9, 25, 1),
        (None, 1, 1),
    ]


def test_what_one_line_has_for_several_purposes_is_told_apart():
    blocks = [Block(0, 10, STACK), Block(1, 20, STACK), Block(2, 25, STACK)]
    rows = allocations_by_line(blocks, {0: "gradients", 2: "gradients"})
    assert [(row.kind, row.size) for row in rows] == [("gradients", 35), ("", 20)]


def test_a_stack_of_plumbing_alone_has_no_line():
    assert line_of([TORCH]) is None
    assert line_of(STACK).file == "/home/me/model.py"
