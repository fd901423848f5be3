from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_memopt.core.profiled_step import ProfiledStep
from lightning_memopt.core.step_timeline import CATEGORIES, Mark, StepTimeline, build_timeline
from lightning_memopt.core.trace_events import MemoryEvent, read_events, read_times


def at(time: float, address: int, size: int, total: int | None = None) -> MemoryEvent:
    return MemoryEvent(time, address, size, total, reserved=0 if total is None else 2 * total)


def last(timeline: StepTimeline) -> dict[str, int]:
    return {name: values[-1] for name, values in timeline.bytes_of.items()}


def assert_sums(timeline: StepTimeline) -> None:
    assert timeline.total
    for position, total in enumerate(timeline.total):
        assert sum(values[position] for values in timeline.bytes_of.values()) == total


def lived(timeline: StepTimeline, time_ms: float) -> int:
    """Return the bytes of the blocks that live at a time."""
    alive = [b for b in timeline.blocks if b.begin_ms <= time_ms < b.end_ms]
    return sum(block.size for block in alive)


# Of events and marks that are made up


def test_a_label_counts_for_the_whole_life_of_the_block_at_its_mark():
    events = [at(10, 100, 8), at(20, 100, -8), at(30, 100, 4), at(50, 100, -4), at(60, 100, 2)]
    marks = [Mark(0, "forward"), Mark(40, "backward", {100: "activations"}), Mark(70, "")]
    timeline = build_timeline(events, marks, {})
    assert [(b.size, b.category) for b in timeline.blocks] == [
        (8, "other"),
        (4, "activations"),
        (2, "other"),
    ]
    by_time = dict(zip(timeline.times_ms, timeline.bytes_of["activations"], strict=True))
    assert by_time == {0: 0, 0.01: 0, 0.02: 0, 0.03: 4, 0.04: 4, 0.05: 0, 0.06: 0, 0.07: 0}
    assert timeline.total == [0, 8, 0, 4, 4, 0, 2, 2]
    assert_sums(timeline)


@pytest.mark.parametrize("order", [CATEGORIES, CATEGORIES[::-1]])
def test_of_two_labels_the_stronger_counts_whichever_comes_first(order: tuple[str, ...]):
    marks = [Mark(0, ""), *(Mark(10 + i, "", {100: name}) for i, name in enumerate(order))]
    timeline = build_timeline([at(5, 100, 8)], [*marks, Mark(99, "")], {})
    assert last(timeline) == {name: 8 if name == "parameters" else 0 for name in CATEGORIES}


def test_the_baseline_is_there_from_the_start_and_may_get_another_label():
    baseline = {100: (8, "parameters"), 200: (16, "other")}
    marks = [Mark(0, "forward"), Mark(10, "backward", {200: "activations"}), Mark(20, "")]
    timeline = build_timeline([], marks, baseline)
    assert timeline.total == [24, 24, 24]
    assert timeline.bytes_of["activations"] == [16, 16, 16]
    assert timeline.bytes_of["parameters"] == [8, 8, 8]


def test_events_before_the_step_and_after_it_are_passed_over():
    events = [at(1, 100, 8), at(15, 200, 4), at(99, 300, 2)]
    timeline = build_timeline(events, [Mark(10, "forward"), Mark(20, "")], {})
    assert max(timeline.total) == 4
    assert timeline.end_ms == 0.01


def test_what_the_device_counts_and_nobody_knows_is_other():
    baseline = {100: (10, "parameters")}
    events = [at(5, 200, 512, total=1524), at(6, 999, -500, total=1024), at(7, 300, 8, total=1100)]
    marks = [Mark(0, "forward"), Mark(9, "", {200: "activations"})]
    timeline = build_timeline(events, marks, baseline, total=1012)
    assert timeline.total == [1012, 1524, 1024, 1100, 1100]
    assert timeline.bytes_of["other"] == [1002, 1002, 502, 578, 578]
    assert timeline.bytes_of["activations"] == [0, 512, 512, 512, 512]
    assert timeline.reserved == [3048, 3048, 2048, 2200, 2200]
    assert_sums(timeline)


def test_a_silent_free_ends_at_the_mark_that_knows_of_it():
    marks = [Mark(0, "forward"), Mark(10, "backward", gone=[100]), Mark(20, "")]
    timeline = build_timeline([at(5, 300, 1)], marks, {100: (8, "gradients"), 200: (4, "other")})
    assert timeline.total == [12, 13, 5, 5]
    (freed,) = [block for block in timeline.blocks if block.address == 100]
    assert freed.end_ms == 0.01


@pytest.mark.parametrize(
    ("address", "size", "is_over"),
    [
        (100, 8, True),
        (104, 8, True),
        (92, 16, True),
        (90, 40, True),
        (108, 8, False),
        (92, 8, False),
    ],
)
def test_a_silent_free_ends_when_its_place_is_used_again(address: int, size: int, is_over: bool):
    events, marks = [at(5, address, size)], [Mark(0, "forward"), Mark(20, "", gone=[100])]
    timeline = build_timeline(events, marks, {100: (8, "gradients")})
    assert timeline.total == [8, size if is_over else 8 + size, size]


def test_a_block_at_the_place_of_one_that_was_freed_silently_stays():
    marks = [Mark(0, ""), Mark(10, "", {100: "gradients"}, gone=[100]), Mark(20, "")]
    timeline = build_timeline([at(5, 100, 4)], marks, {100: (8, "gradients")})
    assert timeline.total[-1] == timeline.bytes_of["gradients"][-1] == 4


def test_phases_reach_from_mark_to_mark():
    marks = [Mark(0, "forward"), Mark(1000, "backward"), Mark(3000, ""), Mark(4000, "optimizer")]
    timeline = build_timeline([], [*marks, Mark(6000, "")], {})
    assert timeline.phases == [("forward", 0, 1), ("backward", 1, 3), ("optimizer", 4, 6)]
    assert [timeline.phase_at(x) for x in (0, 2.5, 3.5, 5)] == [
        "forward",
        "backward",
        "",
        "optimizer",
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_totals", [False, True])
def test_at_every_time_the_categories_are_the_blocks_that_live(seed: int, has_totals: bool):
    draw = random.Random(seed)
    baseline = {10**6 + i * 100: (draw.randint(1, 99), draw.choice(CATEGORIES)) for i in range(9)}
    live = {address: size for address, (size, _) in baseline.items()}
    start = total = sum(live.values())
    events, marks = [], [Mark(0, "forward")]
    for time in range(1, 300):
        if time % 40 == 0:
            marks.append(Mark(time, "x", {address: draw.choice(CATEGORIES) for address in live}))
        elif live and draw.random() < 0.45:
            address = draw.choice(list(live))
            total -= live[address]
            events.append(at(time, address, -live.pop(address), total if has_totals else None))
        else:
            address = draw.choice([a for a in range(0, 30000, 100) if a not in live])
            live[address] = draw.randint(1, 99)
            total += live[address]
            events.append(at(time, address, live[address], total if has_totals else None))
    marks.append(Mark(300, ""))
    timeline = build_timeline(events, marks, baseline, start if has_totals else None)
    assert_sums(timeline)
    assert timeline.total[-1] == total
    assert len({block.category for block in timeline.blocks}) == len(CATEGORIES)
    for position, time in enumerate(timeline.times_ms[:-1]):
        assert lived(timeline, time) == timeline.total[position]
        for name in CATEGORIES:
            alive = [b for b in timeline.blocks if b.begin_ms <= time < b.end_ms]
            expected = sum(block.size for block in alive if block.category == name)
            assert timeline.bytes_of[name][position] == expected


# Of a real trace


def memory(time: float, kind: int, index: int, size: int, total: int = 0) -> dict[str, Any]:
    args = {"Device Type": kind, "Device Id": index, "Addr": 1, "Bytes": size}
    return {
        "name": "[memory]",
        "ts": time,
        "args": args | {"Total Allocated": total, "Total Reserved": 7},
    }


def test_only_events_of_the_device_are_read_in_order():
    events = [
        memory(3, 1, 1, 8, 20),
        memory(2, 0, -1, 4, 99),
        memory(1, 1, 1, 16, 12),
        memory(4, 1, 0, 2),
    ]
    trace = {"traceEvents": [{"name": "aten::empty", "ts": 0}, *events]}
    assert read_events(trace, "cuda", 1) == [
        MemoryEvent(1, 1, 16, 12, 7),
        MemoryEvent(3, 1, 8, 20, 7),
    ]
    assert read_events(trace, "cpu", None) == [MemoryEvent(2, 1, 4, None, 0)]
    assert [event.size for event in read_events(trace, "cuda", None)] == [2]
    assert read_events(trace, "mps", 0) == []


def test_an_allocation_is_in_the_trace_of_this_pytorch_with_its_address(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    with record_function("mine: first"):
        pass
    tensor = torch.empty(12345, dtype=torch.uint8)
    address = tensor.data_ptr()
    del tensor
    with record_function("mine: second"):
        pass
    profiler.stop()
    profiler.export_chrome_trace(str(path))
    trace = json.loads(gzip.decompress(path.read_bytes()))
    times = read_times(trace, "mine: ")
    assert list(times) == ["first", "second"]
    events = read_events(trace, "cpu", None)
    found = [
        (e.size, times["first"] < e.time_us < times["second"])
        for e in events
        if e.address == address
    ]
    assert found == [(12345, True), (-12345, True)]


WIDTH, SAMPLES = 64, 16
KIB = 1024


def step_of(profiled: ProfiledStep, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    profiled.begin(7, [batch])
    with profiled.watching():
        loss = model(batch).square().mean()
    optimizer.zero_grad()
    profiled.begin_phase("backward", loss)
    loss.backward()
    del loss
    profiled.begin_phase("optimizer")
    optimizer.step()
    profiled.finish()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[StepTimeline, ProfiledStep]:
    """A step of two layers and Adam, the second of its run: what is where is known to the byte."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
    )
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batch = torch.randn(SAMPLES, WIDTH)
    model(batch).square().mean().backward()
    optimizer.step()
    profiled = ProfiledStep(model, [optimizer], torch.device("cpu"))
    step_of(profiled, model, optimizer, batch)
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    profiled.operators.export_chrome_trace(str(path))
    return profiled.timeline(path), profiled


def test_categories_of_a_real_step_are_exact(real: Any):
    timeline, _ = real
    assert_sums(timeline)
    weights = 2 * 4 * WIDTH * WIDTH
    activation = 4 * SAMPLES * WIDTH
    begin = {name: values[0] for name, values in timeline.bytes_of.items()}
    state = 2 * weights + 2 * 4  # two moments of each weight, and a step count of each
    # The batch was there before the forward: it is none of its activations.
    assert begin == {
        "parameters": weights,
        "optimizer state": state,
        "gradients": weights,
        "activations": 0,
        "other": activation,
    }
    backward = next(begin for name, begin, _ in timeline.phases if name == "backward")
    position = timeline.times_ms.index(backward)
    # The output of Tanh, and the output, which the square keeps.
    assert timeline.bytes_of["activations"][position] == 2 * activation
    assert timeline.bytes_of["gradients"][position] == 0
    end = last(timeline)
    assert {name: end[name] for name in CATEGORIES[:3]} == {
        "parameters": weights,
        "optimizer state": state,
        "gradients": weights,
    }


def test_phases_of_a_real_step_follow_each_other(real: Any):
    timeline, _ = real
    assert [name for name, _, _ in timeline.phases] == ["forward", "backward", "optimizer"]
    assert timeline.phases[0][1] == 0
    assert timeline.phases[-1][2] == timeline.end_ms > 0


def test_the_state_that_a_first_step_makes_is_optimizer_state(tmp_path: Path):
    model, batch = nn.Linear(WIDTH, WIDTH), torch.randn(SAMPLES, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    profiled = ProfiledStep(model, [optimizer], torch.device("cpu"))
    step_of(profiled, model, optimizer, batch)
    profiled.operators.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    timeline = profiled.timeline(tmp_path / "trace.json.gz")
    state = timeline.bytes_of["optimizer state"]
    assert state[0] == 0
    assert state[-1] == 4 * WIDTH * (WIDTH + 1)
    assert_sums(timeline)


def test_a_profile_keeps_no_memory_alive():
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(SAMPLES, WIDTH)
    profiled = ProfiledStep(model, [], torch.device("cpu"))
    profiled.begin(0, [batch])
    with profiled.watching():
        output = model(batch)
    storage = torch.multiprocessing.reductions.StorageWeakRef(output.untyped_storage())
    address = output.data_ptr()
    profiled.begin_phase("backward", output)
    assert address in profiled.modules.kept_addresses()
    del output
    assert address not in profiled.modules.kept_addresses()
    assert storage.expired()
    profiled.close()
    assert not torch._C._autograd._profiler_enabled()
