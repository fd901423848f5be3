from __future__ import annotations

import torch

from lightning_memopt.core.anatomy import (
    FROZEN,
    ROUNDING,
    TEMPORARIES,
    UNTRACED,
    Anatomy,
    KeptPart,
    Part,
    fits,
    kind_of,
    read_anatomy,
)
from lightning_memopt.core.memory_trace import WORKSPACES, Lifetime, MemoryTrace
from lightning_memopt.core.units import MIB

HALF, FULL = torch.bfloat16, torch.float32


def trace_of(lifetimes: list[Lifetime], events: list[int], **phases: int) -> MemoryTrace:
    """Make a trace by hand; `phases` has where each begins."""
    trace = MemoryTrace("cpu")
    trace.lifetimes, trace.events = lifetimes, events
    trace.phases = [(position, name) for name, position in phases.items()]
    return trace


def step() -> MemoryTrace:
    """A weight of 1000 bytes, a forward that keeps 700 of 1200, a gradient of 1000."""
    lifetimes = [
        Lifetime(1000, FULL, kind="parameters"),
        Lifetime(300, HALF, "mm", "a"),
        Lifetime(500, FULL, "relu", "a"),
        Lifetime(400, FULL, "mm", "b"),
        Lifetime(1000, FULL, "mm", kind="gradients"),
    ]
    events = [1, 2, 3, 4, -3, 5, -4, -2]
    return trace_of(lifetimes, events, forward=1, backward=5, optimizer=8)


def test_the_peak_is_the_most_that_lives_at_once_and_parts_are_what_lives_then():
    found = read_anatomy(step(), has_cache=False)
    assert (found.peak, found.phase) == (2700, "backward")
    assert found.parts == (
        Part("parameters", "float32", 1000),
        Part("gradients", "float32", 1000),
        Part("activations", "float32", 400),
        Part("activations", "bfloat16", 300),
    )
    assert found.size_of("activations") == 700
    assert found.size_of("buffers") == 0
    assert (found.reserved, found.is_measured) == (None, False)


def test_the_phase_of_the_peak_is_that_in_which_it_was_reached():
    big = Lifetime(10_000, FULL)
    for position, phase in [(2, "forward"), (5, "backward"), (8, "optimizer")]:
        trace = step()
        trace.lifetimes.append(big)
        trace.events[position:position] = [6, -6]
        later = {name: at + 2 * (at > position) for at, name in trace.phases}
        trace.phases = [(at, name) for name, at in later.items()]
        found = read_anatomy(trace, has_cache=False)
        assert found.phase == phase
        assert Part(TEMPORARIES, "float32", 10_000) in found.parts


def test_what_forward_leaves_is_kept_by_module_operator_and_type():
    found = read_anatomy(step(), has_cache=False)
    assert set(found.kept) == {
        KeptPart("a", "mm", "bfloat16", 300),
        KeptPart("b", "mm", "float32", 400),
    }
    assert found.kept_bytes == 700
    assert found.kept_by("module") == [("b", 400), ("a", 300)]
    assert found.kept_by("operator") == [("mm", 700)]
    assert found.kept_by("dtype") == [("float32", 400), ("bfloat16", 300)]


def test_kept_is_of_the_last_forward_alone():
    trace = step()
    trace.lifetimes.append(Lifetime(50, FULL, "tanh", "c"))
    trace.phases.append((8, "forward"))
    trace.phases.append((9, "backward"))
    trace.events += [6, -6]
    assert read_anatomy(trace, has_cache=False).kept == (KeptPart("c", "tanh", "float32", 50),)


def test_each_block_is_rounded_up_to_512_bytes_with_a_cache():
    found = read_anatomy(step(), has_cache=True)
    assert found.peak == 1024 + 1024 + 512 + 512
    assert found.size_of(ROUNDING) == found.peak - 2700
    assert sum(part.size for part in found.parts) == found.peak
    assert found.reserved == 2 * MIB


def test_frozen_parameters_are_apart():
    frozen = Lifetime(4, FULL, kind="parameters", is_frozen=True)
    assert kind_of(frozen) == FROZEN
    assert kind_of(Lifetime(4, FULL, kind="parameters")) == "parameters"
    assert kind_of(Lifetime(4, FULL, kind="gradients", is_frozen=True)) == "gradients"
    assert kind_of(Lifetime(4, FULL)) == TEMPORARIES


def test_what_the_device_counted_beyond_the_trace_is_a_part():
    found = read_anatomy(step(), has_cache=True, measured=5000, reserved=9000)
    assert (found.peak, found.reserved, found.is_measured) == (5000, 9000, True)
    assert found.size_of(UNTRACED) == 5000 - 3072
    assert found.size_of(ROUNDING) == 372
    assert sum(part.size for part in found.parts) == 5000


def test_parts_sum_to_the_peak_where_the_device_rounds_less_than_pytorch():
    found = read_anatomy(step(), has_cache=True, measured=2800)
    assert (found.peak, found.size_of(ROUNDING), found.size_of(UNTRACED)) == (2800, 100, 0)
    assert sum(part.size for part in found.parts) == 2800


def test_parts_sum_to_the_peak_where_the_device_has_counted_too_little():
    found = read_anatomy(step(), has_cache=True, measured=100)
    assert (found.peak, found.size_of(ROUNDING)) == (2700, 0)
    assert sum(part.size for part in found.parts) == 2700


def test_the_first_matrix_product_of_a_forward_and_of_a_backward_takes_a_workspace():
    found = read_anatomy(step(), has_cache=False, library_bytes=50)
    assert found.size_of(UNTRACED) == 100
    assert found.peak == 2700 + 100
    trace = step()
    for lifetime in trace.lifetimes:
        lifetime.operator = "relu"
    assert read_anatomy(trace, has_cache=False, library_bytes=50).size_of(UNTRACED) == 0


def test_workspaces_have_no_type():
    trace = trace_of([Lifetime(8, torch.uint8, "roll", kind=WORKSPACES)], [1, -1], forward=0)
    assert read_anatomy(trace, has_cache=False).parts == (Part(WORKSPACES, "", 8),)


def test_a_trace_of_nothing_is_empty():
    assert read_anatomy(trace_of([], []), has_cache=True) == Anatomy(0, "", (), (), 0, False)


def test_steps_fit_where_the_allocator_may_reserve_what_it_needs():
    trace = trace_of([Lifetime(30 * MIB, FULL), Lifetime(11 * MIB, FULL)], [1, 2], forward=0)
    assert read_anatomy(trace, has_cache=True).reserved == 42 * MIB  # segments of 2 MiB each
    assert fits(trace, 42 * MIB, 0)
    assert not fits(trace, 42 * MIB - 1, 0)


def test_reading_twice_gives_the_same():
    trace = step()
    assert read_anatomy(trace, has_cache=True) == read_anatomy(trace, has_cache=True)


def test_all_is_there_in_plain_types():
    assert read_anatomy(step(), has_cache=False).as_dict() == {
        "peak_bytes": 2700,
        "phase": "backward",
        "is_measured": False,
        "reserved_bytes": None,
        "parts": [
            {"kind": "parameters", "dtype": "float32", "size_bytes": 1000},
            {"kind": "gradients", "dtype": "float32", "size_bytes": 1000},
            {"kind": "activations", "dtype": "float32", "size_bytes": 400},
            {"kind": "activations", "dtype": "bfloat16", "size_bytes": 300},
        ],
        "kept_bytes": 700,
        "kept_by_module": [
            {"module": "b", "size_bytes": 400},
            {"module": "a", "size_bytes": 300},
        ],
        "kept_by_operator": [{"operator": "mm", "size_bytes": 700}],
        "kept_by_dtype": [
            {"dtype": "float32", "size_bytes": 400},
            {"dtype": "bfloat16", "size_bytes": 300},
        ],
    }
