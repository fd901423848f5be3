from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import lightning_memopt
from lightning_memopt.core import host_memory, memory
from lightning_memopt.core.memory import MemoryReading, memory_reader, read_memory
from lightning_memopt.core.units import MIB

SIZE = 256 * MIB
SLACK = 16 * MIB


def fill() -> torch.Tensor:
    return torch.empty(SIZE, dtype=torch.uint8).fill_(1)


# The CPU


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_has_figures_in_bytes(device):
    reading = read_memory(device)
    assert reading.reserved == pytest.approx(host_memory.resident_bytes(), abs=SLACK)
    assert reading.allocated > 0
    assert reading.peak >= reading.reserved - SLACK
    assert reading.device_total == psutil.virtual_memory().total
    assert 0 < reading.device_used < reading.device_total
    assert reading.alloc_retries is None
    assert {type(value) for value in dataclasses.astuple(reading)} == {int, type(None)}


def test_an_allocation_shows_in_allocated_reserved_and_peak():
    reader = memory_reader(torch.device("cpu"))
    reader.reset_peak()
    before = reader.read()
    block = fill()
    during = reader.read()
    del block
    after = reader.read()
    for name in ("allocated", "reserved"):
        first, second, third = (getattr(reading, name) for reading in (before, during, after))
        assert second - first == pytest.approx(SIZE, abs=SLACK)
        assert third == pytest.approx(first, abs=SLACK)
    assert after.peak == pytest.approx(before.reserved + SIZE, abs=SLACK)
    reader.reset_peak()
    assert reader.read().peak == pytest.approx(after.reserved, abs=SLACK)


def test_a_peak_that_the_system_does_not_reset_is_unknown(monkeypatch, tmp_path):
    reader = memory_reader(torch.device("cpu"))
    assert reader.read().peak is not None
    monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    reader.reset_peak()
    assert reader.read().peak is None


def test_without_glibc_allocated_is_what_is_resident(monkeypatch):
    monkeypatch.setattr(host_memory, "_glibc", lambda: None)
    reading = read_memory("cpu")
    assert reading.allocated == reading.reserved > 0


def test_releasing_the_cpus_cache_trims_the_heap(monkeypatch):
    calls = []
    monkeypatch.setattr(host_memory, "release_free_memory", lambda: calls.append("trim"))
    memory_reader(torch.device("cpu")).release_cache()
    assert calls == ["trim"]


def test_reading_is_public():
    assert lightning_memopt.read_memory is read_memory


# What can't be read


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:0", "hpu", "nonsense", "", "cuda:100"])
def test_a_device_that_cannot_be_read_here_is_refused_in_one_line(device):
    expected = rf"^`device` must be one whose memory PyTorch can read here .*, got '{device}'\.$"
    with pytest.raises(ValueError, match=expected):
        read_memory(device)


def test_a_device_that_is_not_there_is_no_device_without_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        with pytest.raises(ValueError, match=r"got 'cuda(:0)?'"):
            read_memory(device)


# An accelerator, by a stand-in for its module: there is none on every machine


class Accelerator:
    """What PyTorch's modules of devices offer, with settable figures for device 1."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.figures = {
            "allocated_bytes": {"all": {"current": 60, "peak": 90}},
            "reserved_bytes": {"all": {"current": 80, "peak": 95}},
            "num_alloc_retries": 3,
        }
        self.free = 700

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def memory_stats(self, index: int) -> dict[str, int]:
        assert index == 1
        flat: dict[str, int] = {}
        for name, value in self.figures.items():
            if isinstance(value, dict):
                flat |= {f"{name}.all.{which}": x for which, x in value["all"].items()}
            else:
                flat[name] = value
        return flat

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.calls.append(("mem_get_info", index))
        return self.free, 1000

    def reset_peak_memory_stats(self, index: int) -> None:
        self.calls.append(("reset_peak_memory_stats", index))

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


class NestedAccelerator(Accelerator):
    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        assert index == 1
        return self.figures

    def memory_stats(self, index: int) -> dict[str, int]:
        raise AssertionError("flattening costs most of the time")


@pytest.fixture(params=[Accelerator, NestedAccelerator])
def accelerator(request, monkeypatch) -> Accelerator:
    module = request.param()
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    return module


@pytest.mark.parametrize("device", ["privateuseone", "privateuseone:1"])
def test_an_accelerators_statistics_are_its_reading(accelerator, device):
    assert read_memory(device) == MemoryReading(60, 80, 90, 300, 1000, 3)


def test_an_accelerator_that_was_not_used_has_zeros(accelerator):
    accelerator.figures = {}
    assert read_memory("privateuseone") == MemoryReading(0, 0, 0, 300, 1000, 0)


def test_an_accelerator_without_retries_had_none(accelerator):
    del accelerator.figures["num_alloc_retries"]
    assert read_memory("privateuseone").alloc_retries == 0


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_where_the_device_as_a_whole_cannot_be_read_it_is_unknown(accelerator, monkeypatch, error):
    def refuse(index: int) -> None:
        raise error("not offered")

    monkeypatch.setattr(accelerator, "mem_get_info", refuse)
    assert read_memory("privateuseone") == MemoryReading(60, 80, 90, None, None, 3)


def test_resets_and_releases_go_to_the_device(accelerator):
    reader = memory_reader(torch.device("privateuseone"))
    reader.reset_peak()
    reader.release_cache()
    assert accelerator.calls == [("reset_peak_memory_stats", 1), "empty_cache"]


def test_an_index_beyond_the_devices_is_refused(accelerator):
    with pytest.raises(ValueError, match="got 'privateuseone:2'"):
        read_memory("privateuseone:2")


def test_a_module_without_statistics_is_refused(monkeypatch):
    module = SimpleNamespace(device_count=lambda: 1, current_device=lambda: 0)
    monkeypatch.setattr(torch, "privateuseone", module, raising=False)
    with pytest.raises(ValueError, match="got 'privateuseone'"):
        read_memory("privateuseone")


# How often the whole device is asked


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_the_whole_device_is_asked_rarely(accelerator, clock):
    reader = memory_reader(torch.device("privateuseone"))
    for _ in range(50):
        assert reader.read().device_used == 300
    assert len(accelerator.calls) == 1
    accelerator.free = 500
    clock.now += 0.2
    assert reader.read().device_used == 300
    clock.now += 0.1
    assert reader.read().device_used == 500
    assert len(accelerator.calls) == 2


def test_the_whole_device_is_asked_at_once_when_this_process_took_more(accelerator, clock):
    reader = memory_reader(torch.device("privateuseone"))
    assert reader.read().device_used == 300
    accelerator.figures["reserved_bytes"]["all"]["current"] = 180
    accelerator.free = 600
    assert reader.read() == MemoryReading(60, 180, 90, 400, 1000, 3)


def test_the_machine_is_asked_rarely(monkeypatch, clock):
    calls = []
    monkeypatch.setattr(
        host_memory, "system_used_and_total", lambda: calls.append(1) or (len(calls), 9)
    )
    reader = memory_reader(torch.device("cpu"))
    assert [reader.read().device_used for _ in range(20)] == [1] * 20
    clock.now += 1
    assert reader.read().device_used == 2


# Fragmentation


@pytest.mark.parametrize(
    ("allocated", "reserved", "expected"),
    [(0, 0, 0.0), (0, 100, 1.0), (25, 100, 0.75), (100, 100, 0.0), (150, 100, 0.0), (1, 0, 0.0)],
)
def test_fragmentation_is_the_share_of_reserved_that_is_not_allocated(
    allocated, reserved, expected
):
    reading = MemoryReading(allocated, reserved, None, None, None, None)
    assert reading.fragmentation == expected
    assert type(reading.fragmentation) is float


def test_a_reading_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError, match="allocated"):
        read_memory("cpu").allocated = 0
