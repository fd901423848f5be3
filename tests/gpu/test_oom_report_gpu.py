"""Memory that really runs out on a card that is made small, in each phase and of each kind."""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.cuda._memory_viz import segsum
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import GradientCheckpointing, MemoryMonitor, OOMReport
from lightning_memopt.core.memory_history import recorded_history, take_snapshot
from lightning_memopt.core.units import GIB, MIB
from tests.models import make_trainer

DEVICE = torch.device("cuda", 0)
CARD = 8 * GIB
WIDTH, DEPTH, BATCH = 4096, 16, 512
OOM = "out of memory"


@contextmanager
def card_of(size: int) -> Iterator[None]:
    gc.collect()  # an earlier failure's frames
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


class NeedyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.empty(CARD, dtype=torch.uint8, device=DEVICE)  # of backward
        return grad


class NeedyAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        torch.empty(CARD, dtype=torch.uint8, device=DEVICE)  # of optimizer
        return loss


class Stack(pl.LightningModule):
    """16 blocks of 64 MiB, which keep 32 MiB each for backward."""

    def __init__(self, phase: str, request: int = CARD - GIB, at: int = 5) -> None:
        super().__init__()
        self.phase, self.request, self.at = phase, request, at
        with torch.device(DEVICE):
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
            )

    def ask(self) -> None:
        torch.empty(self.request, dtype=torch.uint8, device=DEVICE)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
        for block in self.blocks:
            x = block(x)
        if batch_idx == self.at and self.phase == "forward":
            self.ask()  # of forward
        if batch_idx == self.at and self.phase == "backward":
            x = NeedyBackward.apply(x)
        return x.square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.phase == "validation":
            self.ask()  # of validation

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = NeedyAdam if self.phase == "optimizer step" else torch.optim.Adam
        return optimizer(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(8 * BATCH, WIDTH)), BATCH)

    val_dataloader = train_dataloader


def fail(model: pl.LightningModule, directory: Path, *callbacks: pl.Callback, **kwargs: Any) -> str:
    trainer = make_trainer(
        OOMReport(directory, max_entries=20_000),
        *callbacks,
        accelerator="gpu",
        num_sanity_val_steps=0,
        limit_val_batches=2,
        **kwargs,
    )
    with pytest.raises(torch.OutOfMemoryError, match=OOM):
        trainer.fit(model)
    (file,) = directory.glob("*.txt")
    text = file.read_text()
    print(text)
    return text


def row(report: str, name: str) -> str:
    (found,) = re.findall(rf"^{name} +(.*)$", report, re.MULTILINE)
    return found


def gib(report: str, name: str) -> float:
    """Return the size of a row in GiB."""
    units = {"B": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
    (found,) = re.findall(rf"^ +([\d.]+) (\w+)  {name}", report, re.MULTILINE)
    return float(found[0]) * units[found[1]]


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer step", "validation"])
def test_each_phase_is_explained_and_its_snapshot_has_events(phase: str, tmp_path: Path) -> None:
    with card_of(CARD):
        report = fail(Stack(phase), tmp_path)
    assert row(report, "phase") == phase
    assert f"# of {phase.split()[0]}" in row(report, "your line") or (
        "self.ask" in row(report, "your line") or "torch.empty" in row(report, "your line")
    )
    parameters = DEPTH * (WIDTH * WIDTH + WIDTH) * 4 / GIB
    assert gib(report, "parameters") == pytest.approx(parameters, rel=0.01)
    state = 0 if phase == "optimizer step" else 2 * parameters
    assert gib(report, "optimizer state") == pytest.approx(state, abs=0.01)
    # Of what is in use nothing but roundings is unaccounted for.
    in_use = float(re.findall(r"What holds the ([\d.]+) GiB in use", report)[0])
    assert gib(report, "other, such as temporaries") < 0.05 * in_use
    if phase == "backward":
        line = row(report, "backward")
        assert re.search(
            r"had come to \w+ of `blocks.15.0`, whose inputs were made in .*:\d+", line
        )
    if phase == "forward":
        kept = DEPTH * 2 * BATCH * WIDTH * 4 / GIB
        assert gib(report, "activations") == pytest.approx(kept, rel=0.05)
        assert f"{kept / DEPTH * 1024:.2f} MiB  blocks." in report
    (file,) = tmp_path.glob("oom-rank0-step*.pickle")
    snapshot = pickle.loads(file.read_bytes())
    trace = snapshot["device_traces"][0]
    assert 0 < len(trace) <= 20_000
    assert [event["size"] for event in trace if event["action"] == "oom"]
    assert any("training_step" in str(event.get("frames")) for event in trace)
    assert "segment" in segsum(snapshot).lower()  # PyTorch's own viewer reads it
    assert take_snapshot(DEVICE) is None  # the record is off again


def test_a_request_larger_than_the_device_is_told_by_its_line(tmp_path: Path) -> None:
    with card_of(CARD):
        model = Stack("forward", request=100 * GIB)
        report = fail(model, tmp_path, MemoryMonitor(verbose=False), ResetPeaks())
    assert row(report, "asked for") == "100.00 GiB"
    assert row(report, "likely kind").startswith("single request larger than the device")
    assert "in ask: torch.empty(self.request, dtype=torch.uint8" in row(report, "your line")
    assert "at step 5" in report
    assert (tmp_path / "oom-rank0-step5.pickle").exists()
    total = gib(report.split("The device")[1], "allocated") + gib(report, "cached")
    total += gib(report, "other processes and drivers' contexts") + gib(report, "free")
    assert total == pytest.approx(torch.cuda.mem_get_info()[1] / GIB, rel=0.001)
    assert gib(report, "is the most that this process may use") == pytest.approx(8, abs=0.01)


class ResetPeaks(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % 3 == 0:
            torch.cuda.reset_peak_memory_stats()


def test_a_fragmented_cache_is_told_from_a_steady_need(tmp_path: Path) -> None:
    class Fragmenting(Stack):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                torch.cuda.empty_cache()
                room = CARD - torch.cuda.memory_reserved()
                pieces = [self.piece() for _ in range(room // (20 * MIB))]
                # Every second piece of a segment of 20 MiB stays: none can be given back.
                self.kept, pieces = pieces, []
                for piece in self.kept:
                    piece.pop()
                torch.empty(256 * MIB, dtype=torch.uint8, device=DEVICE)
            return loss

        def piece(self) -> list[Tensor]:
            return [torch.empty(9 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(2)]

    with card_of(CARD):
        report = fail(Fragmenting(""), tmp_path)
    assert row(report, "likely kind").startswith("fragmentation")
    assert "1. set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`" in report


def test_a_batch_that_is_too_large_is_shown_beside_the_usual(tmp_path: Path) -> None:
    class Uneven(Stack):
        def train_dataloader(self) -> DataLoader[Any]:
            sizes = (BATCH, BATCH, BATCH + 8, BATCH, 20 * BATCH)
            return DataLoader([[torch.randn(n, WIDTH)] for n in sizes], batch_size=None)  # type: ignore[arg-type]

    with card_of(CARD):
        report = fail(Uneven(""), tmp_path)
    assert row(report, "likely kind").startswith("an unusually large batch")
    assert f"This batch: [{20 * BATCH}, {WIDTH}] float32" in report
    assert f"Usual ones: [{BATCH}, {WIDTH}] float32" in report
    assert "`AutoAccumulation()`: a batch in" in report


HOLD = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_that_holds_the_card_is_named(tmp_path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    command = [sys.executable, "-c", HOLD, str(6 * GIB)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            report = fail(Stack("forward", request=20 * GIB), tmp_path)
        finally:
            other.kill()
    assert row(report, "likely kind").startswith("another process: others hold 1")
    assert "end the other processes" in report


def test_what_checkpointing_keeps_is_not_computed_again_for_the_report(tmp_path: Path) -> None:
    with card_of(CARD):
        report = fail(Stack("forward"), tmp_path, GradientCheckpointing("blocks.*"))
    assert gib(report, "activations") < 0.1
    assert "`GradientCheckpointing()`" not in report


def test_a_record_that_was_on_before_stays_on() -> None:
    torch.cuda.memory._record_memory_history(max_entries=100)
    try:
        with recorded_history(DEVICE, 10):
            torch.ones(10, device=DEVICE)
        assert take_snapshot(DEVICE) is not None
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert take_snapshot(DEVICE) is None
