from __future__ import annotations

import csv
import gzip
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import AutoAccumulation, GradientCheckpointing, MemoryMonitor, MemoryProfiler
from lightning_memopt.core.module_memory import ModuleMemory
from lightning_memopt.core.units import MIB
from tests.models import Recorder, make_trainer

WIDTH, SAMPLES, STEP = 1024, 4096, 3
FILES = [
    "blocks.png",
    "categories.png",
    "modules.txt",
    "operators.txt",
    "snapshot.pickle",
    "timeline.csv",
    "trace.json.gz",
]
SIZES = ("parameters", "optimizer_state", "gradients", "activations", "other")


class Layers(pl.LightningModule):
    """Eight layers, each of which keeps 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(6 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(data), batch_size=SAMPLES)


class Outside(pl.Callback):
    """Reads PyTorch's own peak of the profiled step."""

    peak = 0
    begin = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            torch.cuda.reset_peak_memory_stats()
            self.begin = torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP + 1:
            self.peak = torch.cuda.max_memory_allocated()


def fit(*callbacks: pl.Callback, **kwargs: Any) -> Layers:
    torch.manual_seed(0)
    model = Layers()
    make_trainer(*callbacks, **({"accelerator": "gpu"} | kwargs)).fit(model)
    return model


def curve(folder: Path, step: int = STEP) -> list[dict[str, Any]]:
    with (folder / f"step{step}-rank0-timeline.csv").open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [{k: v if k == "phase" else float(v) for k, v in row.items()} for row in rows]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outside]:
    folder, outside = tmp_path_factory.mktemp("profile"), Outside()
    fit(outside, MemoryProfiler(steps=[STEP], dirpath=folder))
    return folder, outside


def test_a_step_has_all_its_files(profiled: Any):
    folder, _ = profiled
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step{STEP}-rank0-{x}" for x in FILES
    ]
    for name in ("blocks", "categories"):
        with Image.open(folder / f"step{STEP}-rank0-{name}.png") as picture:
            assert picture.size == (1120, 840)


def test_the_peak_of_the_timeline_is_pytorchs_own(profiled: Any):
    folder, outside = profiled
    rows = curve(folder)
    peak = max(row["total_bytes"] for row in rows)
    assert outside.peak > 8 * 16 * MIB
    assert peak == pytest.approx(outside.peak, rel=0.01)
    assert rows[0]["total_bytes"] == pytest.approx(outside.begin, rel=0.01)
    for row in rows:
        assert sum(row[f"{name}_bytes"] for name in SIZES) == row["total_bytes"]
        assert row["total_bytes"] <= row["reserved_bytes"]


def test_categories_are_what_the_model_has(profiled: Any):
    folder, _ = profiled
    rows = curve(folder)
    weights = 8 * 4 * WIDTH * (WIDTH + 1)
    for row in (rows[0], rows[-1]):
        assert row["parameters_bytes"] == pytest.approx(weights, rel=0.01)
        assert row["gradients_bytes"] == pytest.approx(weights, rel=0.01)
        assert row["optimizer_state_bytes"] == pytest.approx(2 * weights, rel=0.01)
    peak = max(rows, key=lambda row: row["total_bytes"])
    # What eight layers keep; the last one's may be freed already where memory peaks.
    assert peak["activations_bytes"] == pytest.approx(8 * 16 * MIB, abs=17 * MIB)
    assert rows[-1]["activations_bytes"] <= MIB
    assert {row["phase"] for row in rows} >= {"forward", "backward", "optimizer"}


def test_what_modules_keep_is_what_the_allocator_grew_by():
    model = Layers().cuda()
    memory = ModuleMemory(model, torch.device("cuda", 0))
    batch = torch.randn(SAMPLES, WIDTH, device="cuda")
    for _ in range(2):
        memory.note_inputs([batch])
        with memory.watching():
            loss = model.training_step([batch], 0)
        memory.end_forward(loss)
        loss.backward()
        model.zero_grad()
    forward = memory.forwards[-1]
    new = forward.kept_bytes - forward.kept_before_bytes
    assert sum(row.own_kept_bytes for row in forward.rows) == forward.kept_bytes
    assert forward.kept_before_bytes == 16 * MIB
    assert forward.grown_bytes > 8 * 16 * MIB - 1
    assert new == pytest.approx(forward.grown_bytes, rel=0.05)


def test_the_table_of_operators_is_by_device_memory(profiled: Any):
    folder, _ = profiled
    text = (folder / f"step{STEP}-rank0-operators.txt").read_text()
    (row,) = (line.split() for line in text.splitlines() if line.startswith("aten::addmm "))
    # Eight outputs of 16 MiB.
    assert row[1:6] == ["8", "128.00", "MiB", "128.00", "MiB"]
    assert float(row[8]) > 0
    trace = json.loads(gzip.decompress((folder / f"step{STEP}-rank0-trace.json.gz").read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])


def test_the_snapshot_has_the_events_of_the_step_with_its_lines(profiled: Any):
    folder, _ = profiled
    with (folder / f"step{STEP}-rank0-snapshot.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    events = [event for device in snapshot["device_traces"] for event in device]
    assert sum(event["action"] == "alloc" for event in events) > 20
    names = {frame["name"] for event in events for frame in event.get("frames", [])}
    assert "training_step" in names
    assert snapshot["segments"]


def test_nothing_is_on_after_the_step(profiled: Any):
    assert not torch._C._autograd._profiler_enabled()
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.filterwarnings("ignore:.*normalise over the batch")
def test_weights_and_losses_are_bit_equal_to_those_of_a_run_without(tmp_path: Path):
    def others() -> list[pl.Callback]:
        return [
            MemoryMonitor(verbose=False),
            GradientCheckpointing(layers=["net.0", "net.2"]),
            AutoAccumulation(micro_batch_size=SAMPLES // 2),
        ]

    kwargs = {"precision": "16-mixed"}
    plain = fit(*others(), **kwargs)
    profiler = MemoryProfiler(steps=[1, STEP], dirpath=tmp_path)
    model = fit(*others(), profiler, **kwargs)
    assert len(list(tmp_path.iterdir())) == 2 * len(FILES)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    for row in curve(tmp_path):
        assert sum(row[f"{name}_bytes"] for name in SIZES) == row["total_bytes"]


def test_a_monitor_beside_it_still_sees_pytorchs_peak(tmp_path: Path):
    recorder = Recorder()
    monitor = MemoryMonitor(phases=False, verbose=False)
    profiler = MemoryProfiler(steps=[STEP], dirpath=tmp_path)
    fit(profiler, monitor, logger=recorder, log_every_n_steps=1)
    peaks = recorder.values("memory/peak_allocated_gib")
    assert len(peaks) == 6
    assert peaks[STEP] == pytest.approx(peaks[STEP + 1], rel=0.01)


def test_ranges_for_nsight_are_real_and_balanced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names: list[str] = []
    push = torch.cuda.nvtx.range_push

    def noted(name: str) -> int:
        names.append(name)
        return push(name)

    depth = push("before")
    torch.cuda.nvtx.range_pop()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", noted)
    fit(MemoryProfiler(steps=[STEP], dirpath=tmp_path, nvtx=True))
    assert push("after") == depth
    torch.cuda.nvtx.range_pop()
    assert names[:2] == [f"step {STEP}", "forward"]
    assert {"backward", "optimizer", "net", "net.7.1"} <= set(names)
    trace = json.loads(gzip.decompress((tmp_path / f"step{STEP}-rank0-trace.json.gz").read_bytes()))
    assert not any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    assert max(row["activations_bytes"] for row in curve(tmp_path)) >= 8 * 16 * MIB
    text = (tmp_path / f"step{STEP}-rank0-operators.txt").read_text()
    assert re.search(r"^aten::addmm +8 +128\.00 MiB", text, re.MULTILINE)


def test_lines_are_those_of_the_methods_that_were_asked_for(tmp_path: Path):
    pytest.importorskip("pytorch_memlab")
    before = sys.gettrace()
    profiler = MemoryProfiler(
        steps=[STEP], dirpath=tmp_path, lines=["training_step", "net.3.0.forward"]
    )
    model, plain = fit(profiler), fit()
    text = (tmp_path / f"step{STEP}-rank0-lines.txt").read_text()
    assert "output = self.net(batch[0])" in text
    assert "F.linear" in text
    assert sys.gettrace() is before
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_method_that_is_not_there_is_refused():
    pytest.importorskip("pytorch_memlab")
    profiler = MemoryProfiler(steps=[0], lines=["training_step", "net.9.forward"])
    with pytest.raises(MisconfigurationException, match=r"net\.9\.forward"):
        fit(profiler)


def test_a_failing_step_leaves_neither_profiler_nor_history_nor_range_on(tmp_path: Path):
    class Failing(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == STEP:
                assert torch._C._cuda_isHistoryEnabled()
                raise KeyError("mine")

    depth = torch.cuda.nvtx.range_push("before")
    torch.cuda.nvtx.range_pop()
    profiler = MemoryProfiler(steps=[STEP], dirpath=tmp_path, nvtx=True)
    with pytest.raises(KeyError, match="mine"):
        fit(profiler, Failing())
    assert torch.cuda.nvtx.range_push("after") == depth
    torch.cuda.nvtx.range_pop()
    assert not torch._C._autograd._profiler_enabled()
    assert not torch._C._cuda_isHistoryEnabled()
    assert not list(tmp_path.glob("*"))
