from __future__ import annotations

import gc

import pytest
import torch

from lightning_memopt.core.memory import read_memory
from lightning_memopt.core.step_memory import BETWEEN, PhasePeak, StepMemory, spread
from lightning_memopt.core.units import MIB
from tests.core.test_peaks import GPU, FakeDevice, install


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    return install(monkeypatch, FakeDevice)(GPU).reader


@pytest.fixture
def memory(device) -> StepMemory:
    return StepMemory(GPU)


def run_step(memory: StepMemory, device: FakeDevice, step: int, epoch: int = 0, **sizes: int):
    memory.begin_step(step, epoch)
    for phase, size in sizes.items():
        device.use(size)
        memory.end_phase(phase, step, epoch)


def test_each_phase_of_a_step_has_its_own_peak(memory, device):
    device.allocate(5)
    run_step(memory, device, 0, forward=30, backward=40, optimizer=10)
    assert memory.step_peaks() == {"forward": 35, "backward": 45, "optimizer": 15}


def test_a_phase_that_comes_again_in_a_step_has_its_highest_peak(memory, device):
    memory.begin_step(0, 0)
    for forward, backward in ((30, 5), (70, 9), (10, 20)):
        device.use(forward)
        memory.end_phase("forward", 0, 0)
        device.use(backward)
        memory.end_phase("backward", 0, 0)
    assert memory.step_peaks() == {"forward": 70, "backward": 20}


def test_what_was_before_the_first_step_is_not_in_it(memory, device):
    device.use(500)
    run_step(memory, device, 0, forward=30)
    assert memory.step_peaks() == {"forward": 30}
    assert memory.phases[BETWEEN] == PhasePeak(500, 0, 0)


def test_a_step_begins_where_the_one_before_it_ended(memory, device):
    run_step(memory, device, 0, forward=30)
    memory.end_step("optimizer", 0, 0)
    resets = device.resets
    device.use(500)
    memory.begin_step(1, 0)
    assert device.resets == resets
    device.use(20)
    memory.end_phase("forward", 1, 0)
    assert memory.step_peaks() == {"forward": 500}
    assert memory.phases[BETWEEN] == PhasePeak(0, 0, 0)


@pytest.mark.parametrize("what", ["skipped step", "evaluation", "epoch", "unfinished step"])
def test_what_comes_before_a_step_is_not_in_it_when_more_than_a_step_ended(memory, device, what):
    run_step(memory, device, 0, forward=30)
    memory.end_step("optimizer", 0, 0)
    step = 1
    if what == "skipped step":
        step = 2
    elif what == "evaluation":
        memory.end_other("val", 0, 0)
    elif what == "epoch":
        memory.end_epoch()
    else:
        memory.begin_step(1, 0)
        memory.end_phase("forward", 1, 0)
    device.use(500)
    run_step(memory, device, step, 1, forward=20)
    assert memory.step_peaks() == {"forward": 20}
    assert memory.phases[BETWEEN] == PhasePeak(500, step, 1)


def test_what_interrupts_a_step_is_not_in_it(memory, device):
    memory.begin_step(0, 0)
    device.use(30)
    memory.end_phase("forward", 0, 0)
    device.use(500)
    assert memory.end_other("val", 7, 0) == 500
    device.use(20)
    memory.end_phase("forward", 0, 0)
    assert memory.step_peaks() == {"forward": 30}
    assert memory.phases["val"] == PhasePeak(500, 7, 0)


def test_the_highest_peak_of_each_phase_is_kept_with_its_first_place(memory, device):
    for step, (forward, backward) in enumerate([(10, 9), (80, 9), (80, 9), (20, 9)]):
        run_step(memory, device, step, step // 2, forward=forward, backward=backward)
    assert memory.phases["forward"] == PhasePeak(80, 1, 0)
    assert memory.phases["backward"] == PhasePeak(9, 0, 0)


def test_the_figures_are_those_of_the_last_boundary(memory, device):
    memory.begin_step(0, 0)
    device.allocate(30)
    memory.end_phase("forward", 0, 0)
    device.allocate(10)
    assert (memory.reading.allocated, memory.reading.reserved) == (30, 60)
    memory.end_phase("backward", 0, 0)
    assert (memory.reading.allocated, memory.reading.reserved) == (40, 80)


def test_the_peaks_of_a_step_are_a_copy(memory, device):
    run_step(memory, device, 0, forward=30)
    memory.step_peaks().clear()
    assert memory.step_peaks() == {"forward": 30}


def test_retries_are_counted_from_the_start_of_the_run(device):
    device.retries = 7
    memory = StepMemory(GPU)
    assert memory.alloc_retries == 0
    device.retries = 9
    memory.begin_step(0, 0)
    assert memory.alloc_retries == 2


def test_retries_that_the_device_does_not_count_are_unknown(device):
    device.retries = None
    assert StepMemory(GPU).alloc_retries is None


def test_the_peak_of_an_epoch_is_since_the_last_one_ended(memory, device):
    peaks = []
    for epoch, size in enumerate((90, 20, 40)):
        run_step(memory, device, epoch, epoch, forward=size, backward=5)
        peaks.append(memory.end_epoch())
    assert peaks == [90, 20, 40]
    assert memory.summary()["peak_bytes"] == 90


def test_the_end_of_an_epoch_loses_nothing_of_a_step(memory, device):
    memory.begin_step(0, 0)
    device.use(60)
    memory.end_epoch()
    device.use(20)
    memory.end_phase("forward", 0, 0)
    assert memory.step_peaks() == {"forward": 60}


def test_a_summary_tells_where_the_run_peaked(memory, device):
    device.allocate(4)
    run_step(memory, device, 0, 0, forward=30, backward=40)
    run_step(memory, device, 1, 1, forward=70, backward=40)
    device.retries = 2
    memory.begin_step(2, 1)
    assert memory.summary() == {
        "peak_bytes": 74,
        "peak_phase": "forward",
        "peak_step": 1,
        "peak_epoch": 1,
        "peak_interrupted": False,
        "allocated_bytes": 4,
        "reserved_bytes": 8,
        "gap_bytes": 4,
        "alloc_retries": 2,
        "phases": {
            BETWEEN: {"peak_bytes": 4, "step": 0, "epoch": 0},
            "forward": {"peak_bytes": 74, "step": 1, "epoch": 1},
            "backward": {"peak_bytes": 44, "step": 0, "epoch": 0},
        },
    }


def test_a_phase_is_named_before_what_lies_between_at_the_same_peak(memory, device):
    device.allocate(50)
    memory.begin_step(0, 0)
    memory.end_phase("forward", 0, 0)
    assert memory.phases[BETWEEN].peak == memory.phases["forward"].peak == 50
    assert memory.summary()["peak_phase"] == "forward"


def test_a_summary_has_a_peak_after_the_last_boundary(memory, device):
    run_step(memory, device, 0, forward=30)
    device.use(90)
    summary = memory.summary()
    assert (summary["peak_bytes"], summary["peak_phase"]) == (90, BETWEEN)


def test_a_summary_in_the_middle_of_a_step_changes_nothing(memory, device):
    memory.begin_step(0, 0)
    device.use(60)
    assert memory.summary() == memory.summary()
    device.use(20)
    memory.end_phase("forward", 0, 0)
    assert memory.step_peaks() == {"forward": 60}


def test_a_summary_before_the_first_boundary_has_no_phases(memory):
    summary = memory.summary()
    assert summary["phases"] == {}
    assert summary["peak_phase"] == BETWEEN


def test_a_foreign_reset_marks_the_run_and_lowers_nothing_seen_before(memory, device):
    run_step(memory, device, 0, forward=80)
    device.allocate(10)
    memory.begin_step(1, 0)
    device.peak = 0
    memory.end_phase("forward", 1, 0)
    summary = memory.summary()
    assert summary["peak_interrupted"] is True
    assert summary["peak_bytes"] == 80


def test_two_runs_at_once_have_the_same_figures(device):
    first, second = StepMemory(GPU), StepMemory(GPU)
    for step, size in enumerate((30, 80, 20)):
        first.begin_step(step, 0)
        second.begin_step(step, 0)
        device.use(size)
        first.end_phase("forward", step, 0)
        second.end_phase("forward", step, 0)
        assert first.step_peaks() == second.step_peaks() == {"forward": size}
    assert first.summary() == second.summary()


def test_a_run_that_nobody_holds_is_no_longer_followed(monkeypatch):
    counter = install(monkeypatch, FakeDevice)(GPU)
    memory = StepMemory(GPU)
    assert len(counter._spans) == 3
    del memory
    gc.collect()
    assert len(counter._spans) == 0


# A real counter


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_on_the_cpu_a_temporary_allocation_is_in_its_phase_and_in_no_other(phase):
    memory = StepMemory(torch.device("cpu"))
    before = read_memory("cpu").reserved
    memory.begin_step(0, 0)
    for name in ("forward", "backward", "optimizer"):
        if name == phase:
            torch.empty(256 * MIB, dtype=torch.uint8).fill_(1)
        memory.end_phase(name, 0, 0)
    peaks = {name: peak - before for name, peak in memory.step_peaks().items()}
    assert peaks.pop(phase) == pytest.approx(256 * MIB, abs=16 * MIB)
    assert len(peaks) == 2
    assert max(peaks.values()) < 16 * MIB
    assert memory.summary()["peak_phase"] == phase


# Ranks


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0, 0.0)),
        ([1.0, 5.0, 3.0], (1.0, 3.0, 5.0, 1.0)),
        ([2.0, 7.0, 7.0], (2.0, 16 / 3, 7.0, 1.0)),
        ([0.0, 0.0], (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_a_spread_is_least_mean_largest_and_the_first_rank_of_the_largest(values, expected):
    found = spread(iter(values))
    assert found == dict(zip(("min", "mean", "max", "max_rank"), expected, strict=True))
    assert {type(value) for value in found.values()} == {float}
