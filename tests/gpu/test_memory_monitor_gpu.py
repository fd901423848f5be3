from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import MemoryMonitor, read_memory
from lightning_memopt.core.units import GIB, MIB
from tests.models import Recorder, make_trainer

TRAIN_TEMPORARY, VAL_TEMPORARY = 256 * MIB, 512 * MIB
WIDTH = 2048
PEAK, VAL_PEAK = "memory/peak_allocated_gib", "memory_val/peak_allocated_gib"
PHASES = ("forward", "backward", "optimizer")


class Spending(pl.LightningModule):
    """Allocates temporarily in forward, in validation more; keeps what was resident before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.resident: dict[str, list[int]] = {"train": [], "val": []}

    def spend(self, stage: str, size: int) -> None:
        self.resident[stage].append(torch.cuda.memory_allocated())
        torch.empty(size, dtype=torch.uint8, device=self.device)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.spend("train", TRAIN_TEMPORARY)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.spend("val", VAL_TEMPORARY)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(72, WIDTH)), batch_size=8)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(16, WIDTH)), batch_size=8)


def monitored(
    model: pl.LightningModule, *callbacks: pl.Callback, monitor: MemoryMonitor, **kwargs: Any
) -> Recorder:
    """Fit on the GPU and return what was logged; the monitor comes last in the callbacks."""
    recorder = Recorder()
    defaults = {"accelerator": "gpu", "logger": recorder, "num_sanity_val_steps": 0}
    make_trainer(*callbacks, monitor, **(defaults | kwargs)).fit(model)
    return recorder


@pytest.fixture(autouse=True)
def _settled() -> None:
    # What the first run on a device allocates for good (cuBLAS's workspace) is of no test.
    monitored(Spending(), monitor=MemoryMonitor(verbose=False))
    gc.collect()
    torch.cuda.empty_cache()


def test_train_and_validation_have_their_own_peaks_and_a_sample_shows_neither():
    model, monitor = Spending(), MemoryMonitor(verbose=False)
    recorder = monitored(model, monitor=monitor)
    forward = recorder.values("memory_phase/forward_peak_gib")
    assert len(forward) == len(model.resident["train"]) == 9
    for peak, resident in zip(forward, model.resident["train"], strict=True):
        assert peak == pytest.approx((resident + TRAIN_TEMPORARY) / GIB, rel=0.02)
    validation = recorder.values(VAL_PEAK)
    assert len(validation) == len(model.resident["val"]) == 2
    for peak, resident in zip(validation, model.resident["val"], strict=True):
        assert peak == pytest.approx((resident + VAL_TEMPORARY) / GIB, rel=0.02)
    assert recorder.values(PEAK) == forward
    for key in ("memory/allocated_gib", "memory_phase/backward_peak_gib"):
        assert max(recorder.values(key)) < TRAIN_TEMPORARY / GIB
    assert max(recorder.values("memory_phase/optimizer_peak_gib")) < TRAIN_TEMPORARY / GIB
    summary = monitor.summary()
    assert summary["peak_phase"] == "val"
    assert summary["peak_bytes"] == max(validation) * GIB
    assert summary["peak_interrupted"] is False


class Reset(pl.Callback):
    """Resets the peak at one hook, every third time."""

    def __init__(self, hook: str) -> None:
        self.calls = 0
        setattr(self, hook, self.reset)

    def reset(self, *_: Any) -> None:
        self.calls += 1
        if self.calls % 3 == 2:
            torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("is_before_the_monitor", [True, False])
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_validation_batch_end",
        "on_train_epoch_end",
    ],
)
def test_resets_by_other_code_lower_no_peak_and_are_marked(hook, is_before_the_monitor):
    undisturbed, disturbed = MemoryMonitor(verbose=False), MemoryMonitor(verbose=False)
    expected = monitored(Spending(), monitor=undisturbed, max_epochs=2)
    reset = Reset(hook)
    if is_before_the_monitor:
        found = monitored(Spending(), reset, monitor=disturbed, max_epochs=2)
    else:
        found = Recorder()
        make_trainer(
            disturbed,
            reset,
            accelerator="gpu",
            logger=found,
            num_sanity_val_steps=0,
            max_epochs=2,
        ).fit(Spending())
    assert reset.calls >= 2
    assert disturbed.summary()["peak_interrupted"] is True
    assert undisturbed.summary()["peak_interrupted"] is False
    for key in (PEAK, VAL_PEAK, *(f"memory_phase/{phase}_peak_gib" for phase in PHASES)):
        assert found.values(key) == pytest.approx(expected.values(key), rel=0.02), key
    peaks = [monitor.summary()["peak_bytes"] for monitor in (undisturbed, disturbed)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


class Outside(pl.Callback):
    """Reads PyTorch's own peak right before the monitor does."""

    def __init__(self) -> None:
        self.peaks: dict[str, list[int]] = {phase: [] for phase in PHASES}

    def on_before_backward(self, *_: Any) -> None:
        self.peaks["forward"].append(torch.cuda.max_memory_allocated())

    def on_after_backward(self, *_: Any) -> None:
        self.peaks["backward"].append(torch.cuda.max_memory_allocated())

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks["optimizer"].append(torch.cuda.max_memory_allocated())


def test_the_peak_of_each_phase_is_pytorchs_own_to_the_byte():
    outside = Outside()
    recorder = monitored(Spending(), outside, monitor=MemoryMonitor(verbose=False))
    for phase in PHASES:
        found = [peak * GIB for peak in recorder.values(f"memory_phase/{phase}_peak_gib")]
        assert found == outside.peaks[phase]
        assert len(found) == 9


def test_without_phases_the_peak_of_a_step_is_pytorchs_own_to_the_byte():
    outside = Outside()
    recorder = monitored(Spending(), outside, monitor=MemoryMonitor(phases=False, verbose=False))
    assert [peak * GIB for peak in recorder.values(PEAK)] == outside.peaks["optimizer"]


def test_a_step_has_six_keys():
    recorder = monitored(Spending(), monitor=MemoryMonitor(verbose=False))
    keys = {key for _, point in recorder.points for key in point if key.startswith("memory/")}
    names = ("allocated_gib", "reserved_gib", "peak_allocated_gib", "device_used_gib")
    assert keys == {f"memory/{name}" for name in (*names, "fragmentation", "alloc_retries")}


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def strictly(name: str) -> Any:
    """Return a hook of the monitor that may not wait for the device."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        with no_synchronization():
            getattr(MemoryMonitor, name)(self, *args, **kwargs)
        self.called.add(name)

    return hook


STRICT = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_hook_of_a_batch_waits_for_the_device():
    with (
        no_synchronization(),
        pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"),
    ):
        torch.ones(1, device="cuda").item()
    strict = type("Strict", (MemoryMonitor,), {name: strictly(name) for name in STRICT})
    monitor = strict(verbose=False)
    monitor.called = set()
    recorder = monitored(Spending(), monitor=monitor)
    assert monitor.called == set(STRICT)
    assert len(recorder.values(PEAK)) == 9


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
def test_a_reading_has_pytorchs_own_figures(device):
    torch.cuda.reset_peak_memory_stats(0)
    held = torch.empty(TRAIN_TEMPORARY, dtype=torch.uint8, device="cuda:0")
    torch.empty(VAL_TEMPORARY, dtype=torch.uint8, device="cuda:0")
    reading = read_memory(device)
    assert reading.allocated == torch.cuda.memory_allocated(0) >= held.numel()
    assert reading.reserved == torch.cuda.memory_reserved(0)
    assert reading.peak == torch.cuda.max_memory_allocated(0) >= held.numel() + VAL_TEMPORARY
    assert reading.device_total == torch.cuda.mem_get_info(0)[1]
    assert reading.reserved <= reading.device_used <= reading.device_total
    assert 0 <= reading.fragmentation <= 1
