from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_memopt.core import peaks
from lightning_memopt.core.memory import MemoryReading
from lightning_memopt.core.peaks import PeakCounter, peak_counter, watched_resets
from lightning_memopt.core.units import MIB

GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)
RESETS = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")


class FakeDevice:
    """A device with exact figures: what is allocated, and the peak since the counter was reset."""

    def __init__(self, has_peak: bool = True) -> None:
        self.allocated = self.peak = self.retries = self.resets = 0
        self.has_peak = has_peak

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size

    def use(self, size: int) -> None:
        self.allocate(size)
        self.free(size)

    def read(self) -> MemoryReading:
        peak = self.peak if self.has_peak else None
        return MemoryReading(self.allocated, 2 * self.allocated, peak, None, None, self.retries)

    def reset_peak(self) -> None:
        self.resets += 1
        self.peak = self.allocated

    def release_cache(self) -> None:
        raise AssertionError("nobody asked for that")


class TorchDevice(FakeDevice):
    """Resets through PyTorch's function, as the real one does."""

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(0)


def install(monkeypatch: pytest.MonkeyPatch, make: Callable[[], FakeDevice]) -> Any:
    """Put fake devices behind the counters; returns a function that gives a device's counter."""
    monkeypatch.setattr(peaks, "_counters", {})
    monkeypatch.setattr(peaks, "memory_reader", lambda _: make())
    return peak_counter


@pytest.fixture
def counter(monkeypatch) -> PeakCounter:
    return install(monkeypatch, FakeDevice)(GPU)


@pytest.fixture
def device(counter) -> FakeDevice:
    return counter.reader


# Spans


def test_a_span_has_the_peak_since_it_was_opened(counter, device):
    device.use(100)
    span = counter.open()
    device.allocate(10)
    device.use(20)
    counter.fold()
    assert span.peak == 30
    assert not span.interrupted


def test_a_peak_before_a_span_is_not_its_own(counter, device):
    device.allocate(5)
    device.use(100)
    span = counter.open()
    counter.fold()
    assert span.peak == 5


def test_opening_a_span_loses_no_peak_of_another(counter, device):
    outer = counter.open()
    device.use(70)
    inner = counter.open()
    device.use(40)
    counter.fold()
    assert (outer.peak, inner.peak) == (70, 40)
    assert not outer.interrupted


def test_a_lap_gives_the_peak_since_the_last_lap_and_the_figures_of_now(counter, device):
    span = counter.open()
    device.retries = 4
    found = []
    for size in (30, 10, 20):
        device.allocate(1)
        device.use(size)
        peak, reading = counter.lap(span)
        found.append((peak, reading.allocated, reading.reserved, reading.alloc_retries))
    assert found == [(31, 1, 2, 4), (12, 2, 4, 4), (23, 3, 6, 4)]


def test_laps_of_one_observer_lose_no_peak_of_another(counter, device):
    run, phase = counter.open(), counter.open()
    for size in (30, 90, 20):
        device.use(size)
        counter.lap(phase)
    assert run.peak == 90
    assert not run.interrupted


def test_a_lap_without_any_allocation_has_what_is_allocated(counter, device):
    span = counter.open()
    device.allocate(7)
    counter.lap(span)
    assert counter.lap(span)[0] == 7


def test_folding_resets_nothing(counter, device):
    span = counter.open()
    resets = device.resets
    device.use(50)
    counter.fold()
    counter.fold()
    assert span.peak == device.peak == 50
    assert device.resets == resets


def test_a_span_ends_when_nobody_holds_it(counter, device):
    kept, dropped = counter.open(), counter.open()
    assert counter._open_spans() == [kept, dropped]
    del dropped
    gc.collect()
    assert counter._open_spans() == [kept]
    assert len(counter._spans) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_observers_do_every_peak_is_that_of_its_own_time(counter, device, seed):
    choose = random.Random(seed)
    spans: dict[Any, int] = {}  # span -> the highest allocation since it began
    for _ in range(300):
        action = choose.choice(["allocate", "free", "open", "lap", "fold", "restart", "drop"])
        if action == "allocate":
            device.allocate(choose.randrange(100))
            spans = {span: max(peak, device.allocated) for span, peak in spans.items()}
        elif action == "free":
            device.free(choose.randrange(device.allocated + 1))
        elif action == "open" and len(spans) < 6:
            spans[counter.open()] = device.allocated
        elif action in {"fold", "restart"}:
            getattr(counter, action)()
            assert {span: span.peak for span in spans} == spans
        elif action == "lap" and spans:
            span = choose.choice(list(spans))
            assert counter.lap(span)[0] == spans[span]
            spans[span] = device.allocated
        elif action == "drop" and spans:
            del spans[choose.choice(list(spans))]
    assert not any(span.interrupted for span in spans)


# Devices without a counter of their own


def test_without_a_counter_the_highest_sample_is_the_peak(monkeypatch):
    counter = install(monkeypatch, lambda: FakeDevice(has_peak=False))(GPU)
    device, span = counter.reader, counter.open()
    device.allocate(30)
    counter.fold()
    device.free(20)
    device.use(100)  # between two samples: unseen
    assert counter.lap(span)[0] == 30
    assert counter.lap(span)[0] == 10
    assert not span.interrupted


def test_on_a_cpu_without_a_counter_the_samples_are_of_resident_memory(monkeypatch):
    counter = install(monkeypatch, lambda: FakeDevice(has_peak=False))(torch.device("cpu"))
    span = counter.open()
    counter.reader.allocate(30)
    assert counter.lap(span)[0] == 60


def test_on_a_cpu_a_peak_below_what_is_allocated_is_no_foreign_reset(monkeypatch):
    # Allocated memory that nobody touched is not resident, and the peak is of resident memory.
    counter = install(monkeypatch, FakeDevice)(torch.device("cpu"))
    span = counter.open()
    counter.reader.allocated = 100
    counter.restart()
    counter.reader.peak = 40
    counter.fold()
    assert not span.interrupted
    assert span.peak == 40


def test_every_caller_shares_a_devices_counter(monkeypatch):
    counter_of = install(monkeypatch, FakeDevice)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert counter_of(torch.device("cuda")) is counter_of(OTHER_GPU)
    assert counter_of(GPU) is not counter_of(OTHER_GPU)
    assert counter_of(torch.device("cpu")) is counter_of(torch.device("cpu", 0))


# Resets by somebody else


def test_a_counter_that_fell_was_reset_by_somebody_else(counter, device):
    span = counter.open()
    device.use(80)
    counter.fold()
    device.peak = 0
    device.use(10)
    counter.fold()
    assert span.peak == 80
    assert span.interrupted


def test_a_counter_below_what_was_allocated_at_its_start_was_reset(counter, device):
    device.allocate(50)
    span = counter.open()
    device.free(45)
    device.reset_peak()
    device.use(10)
    counter.fold()
    assert span.interrupted


def test_a_mark_is_for_the_spans_that_were_open(counter, device):
    old = counter.open()
    device.use(80)
    counter.fold()
    device.peak = 0
    counter.fold()
    new = counter.open()
    device.use(80)
    counter.fold()
    assert old.interrupted
    assert not new.interrupted


def torch_functions() -> dict[Any, Any]:
    return {
        (module, name): getattr(module, name)
        for module in peaks._modules_with_resets()
        for name in RESETS
        if hasattr(module, name)
    }


@pytest.fixture
def torch_device(monkeypatch) -> Any:
    """The counter of a device that PyTorch's own functions reset."""
    counter = install(monkeypatch, TorchDevice)(GPU)

    def reset(device: Any = None) -> str:
        counter.reader.resets += 1
        counter.reader.peak = counter.reader.allocated
        return "done"

    for module in (torch.cuda, torch.cuda.memory):
        for name in RESETS:
            monkeypatch.setattr(module, name, reset)
    return counter


@pytest.mark.parametrize("name", RESETS)
@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.memory])
def test_a_watched_reset_loses_no_peak_and_is_marked(torch_device, module, name):
    with watched_resets():
        span = torch_device.open()
        torch_device.reader.use(80)
        assert getattr(module, name)(device=0) == "done"
        torch_device.reader.use(30)
        torch_device.fold()
    assert span.peak == 80
    assert span.interrupted


def test_a_watched_reset_loses_nothing_of_a_lap(torch_device):
    with watched_resets():
        span = torch_device.open()
        torch_device.reader.use(80)
        torch.cuda.reset_peak_memory_stats()
        torch_device.reader.use(30)
        assert torch_device.lap(span)[0] == 80
        torch_device.reader.use(20)
        assert torch_device.lap(span)[0] == 20


def test_a_reset_that_nobody_watches_is_noticed_all_the_same(torch_device):
    span = torch_device.open()
    torch_device.reader.use(80)
    torch_device.fold()
    torch.cuda.reset_peak_memory_stats()
    torch_device.fold()
    assert span.interrupted


def test_a_counters_own_reset_is_not_foreign(torch_device):
    with watched_resets():
        run, phase = torch_device.open(), torch_device.open()
        for size in (30, 80, 10):
            torch_device.reader.use(size)
            torch_device.lap(phase)
    assert torch_device.reader.resets >= 5
    assert run.peak == 80
    assert not run.interrupted
    assert not phase.interrupted


def test_the_own_reset_of_one_device_is_not_foreign_to_another(torch_device):
    other = peak_counter(OTHER_GPU)
    with watched_resets():
        span = other.open()
        torch_device.restart()
        other.fold()
    assert not span.interrupted


def test_a_reset_on_an_accelerator_says_nothing_about_the_cpu(torch_device):
    with watched_resets():
        span = peak_counter(torch.device("cpu")).open()
        torch.cuda.reset_peak_memory_stats()
    assert not span.interrupted


def test_a_reset_that_fails_fails_for_its_caller_and_is_no_own_one_later(monkeypatch, counter):
    def fail() -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as broken:
        broken.setattr(counter.reader, "reset_peak", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            counter.restart()
    assert not counter.is_resetting


# The functions are PyTorch's own when nobody watches


def test_what_pytorch_resets_peaks_with_is_watched():
    watched = {(module.__name__, name) for module, name in torch_functions()}
    assert {("torch.cuda", name) for name in RESETS} <= watched
    assert {("torch.cuda.memory", name) for name in RESETS} <= watched
    assert ("torch.xpu", RESETS[0]) in watched


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_functions_are_wrapped_until_the_last_watcher_leaves(order):
    originals = torch_functions()
    assert originals
    watchers = [watched_resets() for _ in order]
    for watcher in watchers:
        watcher.__enter__()
    wrapped = torch_functions()
    for left, index in enumerate(reversed(order)):
        now = torch_functions()
        assert all(now[key] is wrapped[key] is not originals[key] for key in originals), left
        assert all(now[key].__wrapped__ is originals[key] for key in originals)
        watchers[index].__exit__(None, None, None)
    now = torch_functions()
    assert all(now[key] is originals[key] for key in originals)


def test_the_functions_come_back_after_an_exception_and_can_be_watched_again():
    originals = torch_functions()
    for _ in range(3):
        with pytest.raises(KeyError, match="inside"), watched_resets():
            raise KeyError("inside", torch_functions() != originals)
        assert torch_functions() == originals


def test_what_somebody_else_put_on_top_meanwhile_stays(monkeypatch, torch_device):
    calls = []
    with watched_resets():
        ours = torch.cuda.reset_peak_memory_stats

        def theirs(device: Any = None) -> None:
            calls.append(device)
            ours(device)

        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", theirs)
    assert torch.cuda.reset_peak_memory_stats is theirs
    span = torch_device.open()
    torch_device.reader.use(80)
    torch.cuda.reset_peak_memory_stats("theirs")
    assert (calls, span.peak, span.interrupted) == ([0, "theirs"], 80, True)


# A real counter


def test_on_the_cpu_a_temporary_allocation_is_in_its_own_lap_and_in_no_other():
    counter = peak_counter(torch.device("cpu"))
    run, span = counter.open(), counter.open()
    found = []
    for size in (0, 256 * MIB, 0, 0):
        torch.empty(size, dtype=torch.uint8).fill_(1)
        found.append(counter.lap(span)[0])
    assert found[1] - found[0] == pytest.approx(256 * MIB, abs=16 * MIB)
    assert found[2] == pytest.approx(found[0], abs=16 * MIB)
    assert found[3] == pytest.approx(found[0], abs=16 * MIB)
    assert run.peak == max(found)
    assert not run.interrupted
