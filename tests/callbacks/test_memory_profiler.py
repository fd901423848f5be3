from __future__ import annotations

import copy
import csv
import gc
import gzip
import json
import logging
import pickle
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import (
    AutoAccumulation,
    AutomaticMixedPrecision,
    GradientAccumulation,
    GradientCheckpointing,
    MemoryMonitor,
    MemoryProfiler,
)
from lightning_memopt.callbacks import _profile_report
from lightning_memopt.core import memory_history, nvtx_ranges, profiled_step
from tests.models import Blocks, Recorder, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

TEXTS = ["modules.txt", "operators.txt", "timeline.csv", "trace.json.gz"]
PICTURES = ["blocks.png", "categories.png"]
SIZES = ("parameters", "optimizer_state", "gradients", "activations", "other")


@pytest.fixture
def pictures() -> None:
    """Let a test draw; it takes half a second a step."""


@pytest.fixture(autouse=True)
def _without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(_profile_report, "has_pictures", bool)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A function that returns what the profiler said."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")

    def said() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if text.startswith("MemoryProfiler")]

    return said


def fit(model: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    trainer = make_trainer(*callbacks, **kwargs)
    torch.manual_seed(1)
    trainer.fit(model)
    return trainer


def build(model: type[Any] = Blocks, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return model(**kwargs)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_curve(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [{k: v if k == "phase" else float(v) for k, v in row.items()} for row in rows]


def phases(path: Path) -> list[str]:
    """Return the phases of a step in their order, each once until the next."""
    found = [row["phase"] for row in read_curve(path)]
    found = [phase for phase in found if phase]
    return [x for i, x in enumerate(found) if i == 0 or found[i - 1] != x]


class Seen(pl.Callback):
    """What is on at the start and in the middle of each step."""

    def __init__(self) -> None:
        self.begin: dict[int, bool] = {}
        self.middle: dict[int, bool] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.begin[trainer.global_step] = is_anything_on(module)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.middle[trainer.global_step] = is_anything_on(module)


def is_anything_on(model: pl.LightningModule) -> bool:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return (
        torch._C._autograd._profiler_enabled()
        or "training_step" in vars(model)
        or sum(hooks) > 0
        or memory_history._users > 0
    )


# What is written


def test_each_chosen_step_has_its_files_and_no_other(tmp_path: Path, pictures: None):
    fit(build(), MemoryProfiler(steps=(1, 3), dirpath=tmp_path / "a" / "b"))
    expected = [f"step{n}-rank0-{name}" for n in (1, 3) for name in sorted(TEXTS + PICTURES)]
    assert names(tmp_path / "a" / "b") == expected


def test_the_files_have_what_their_names_say(tmp_path: Path, pictures: None):
    fit(build(width=64), MemoryProfiler(steps=[1], dirpath=str(tmp_path)))
    stem = tmp_path / "step1-rank0"
    operators = Path(f"{stem}-operators.txt").read_text()
    # Five linear layers; four have an output of 4 x 64 numbers, and the last one of 4.
    assert re.search(r"^aten::addmm +5 +4\.02 KiB +4\.02 KiB ", operators, re.MULTILINE)
    assert "lightning_memopt" not in operators
    trace = json.loads(gzip.decompress(Path(f"{stem}-trace.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])
    modules = Path(f"{stem}-modules.txt").read_text()
    assert all(f"\n{name} " in modules for name in ("stem", "blocks.0.norm", "head"))
    for name in PICTURES:
        with Image.open(f"{stem}-{name}") as picture:
            assert picture.size == (1120, 840)
            assert len(picture.convert("RGB").getcolors(10**6)) > 20
    rows = read_curve(Path(f"{stem}-timeline.csv"))
    assert [row["time_ms"] for row in rows] == sorted(row["time_ms"] for row in rows)
    for row in rows:
        assert sum(row[f"{name}_bytes"] for name in SIZES) == row["total_bytes"] > 0
    peak = max(rows, key=lambda row: row["total_bytes"])
    assert peak["activations_bytes"] > 0


def test_parameters_gradients_and_optimizer_state_are_exact(tmp_path: Path):
    model = build()
    fit(model, MemoryProfiler(steps=[2], dirpath=tmp_path))
    rows = read_curve(tmp_path / "step2-rank0-timeline.csv")
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    buffers = sum(b.untyped_storage().nbytes() for b in model.buffers())
    for row in (rows[0], rows[-1]):
        assert row["parameters_bytes"] == weights + buffers
        assert row["gradients_bytes"] == row["optimizer_state_bytes"] == weights


class Plain(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.stem(batch[0]).tanh()).square().mean()


def test_modules_sum_up_to_what_autograd_keeps(tmp_path: Path):
    model = build(Plain)
    fit(model, MemoryProfiler(steps=[0], dirpath=tmp_path))
    text = (tmp_path / "step0-rank0-modules.txt").read_text()
    # By hand, of four samples: the batch that the stem keeps, the output of the hyperbolic tangent
    # that it and the head keep, and the output whose square is taken. And a number of eight
    # bytes: Lightning divides the loss by it.
    kept = 4 * 4 * (model.stem.in_features + model.stem.out_features + 1) + 8
    assert re.search(rf"^distinct storages .*\({kept} bytes\)$", text, re.MULTILINE)
    assert "sum up to" not in text


@pytest.mark.parametrize("kind", ["none", "csv"])
def test_without_a_folder_they_go_beside_the_logs(kind: str, tmp_path: Path):
    logger = CSVLogger(tmp_path, name="runs", version="a") if kind == "csv" else False
    fit(build(), MemoryProfiler(steps=[0]), logger=logger, default_root_dir=tmp_path)
    root = tmp_path / "runs" / "a" if kind == "csv" else tmp_path
    assert names(root / "memory_profile") == [f"step0-rank0-{name}" for name in TEXTS]


def test_no_file_is_replaced(tmp_path: Path):
    for _ in range(3):
        fit(build(), MemoryProfiler(steps=[1], dirpath=tmp_path))
    stems = ("step1-rank0", "step1-rank0-2", "step1-rank0-3")
    assert names(tmp_path) == sorted(f"{stem}-{name}" for stem in stems for name in TEXTS)


def test_tensorboard_gets_pictures_and_tables(tmp_path: Path, pictures: None):
    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    fit(build(), MemoryProfiler(steps=[1, 2]), logger=logger, log_every_n_steps=1)
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    assert set(events.Tags()["images"]) == {
        "memory_profile/categories",
        "memory_profile/blocks",
    }
    for tag in events.Tags()["images"]:
        images = events.Images(tag)
        assert [(image.step, image.width, image.height) for image in images] == [
            (1, 700, 525),
            (2, 700, 525),
        ]
    for name, word in (("operators", b"aten::addmm"), ("modules", b"blocks.0.linear")):
        (first, second) = events.Tensors(f"memory_profile/{name}/text_summary")
        assert (first.step, second.step) == (1, 2)
        assert word in first.tensor_proto.string_val[0]


def test_without_matplotlib_the_rest_is_written_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Any
):
    monkeypatch.setattr("lightning_memopt.callbacks.memory_profiler.has_pictures", bool)
    fit(build(), MemoryProfiler(steps=[0], dirpath=tmp_path))
    assert names(tmp_path) == [f"step0-rank0-{name}" for name in TEXTS]
    assert 'pip install "lightning-memopt[profiler]"' in lines()[0]


def test_one_line_at_the_start_and_one_for_each_step(tmp_path: Path, lines: Any):
    fit(build(), MemoryProfiler(steps=[3, 1], dirpath=tmp_path))
    start, first, second = lines()
    assert start == f"MemoryProfiler: profiling steps 1, 3 into {tmp_path}"
    for step, line in ((1, first), (3, second)):
        assert line.startswith(f"MemoryProfiler: step {step}: peak ")
        assert "activations" in line
        assert f"{tmp_path}/step{step}-rank0-*: modules.txt, operators.txt" in line
        assert "\n" not in line


# Steps of all kinds


@pytest.mark.parametrize("is_suite", [False, True])
def test_a_step_is_its_whole_window(tmp_path: Path, is_suite: bool):
    profiler = MemoryProfiler(steps=[1], dirpath=tmp_path)
    if is_suite:
        fit(build(), GradientAccumulation(steps=3), profiler)
    else:
        fit(build(), profiler, accumulate_grad_batches=3)
    found = phases(tmp_path / "step1-rank0-timeline.csv")
    assert found == ["forward", "backward"] * 3 + ["optimizer"]
    assert "of 3, sorted" in (tmp_path / "step1-rank0-modules.txt").read_text()


def test_a_short_last_window_ends_too(tmp_path: Path):
    fit(build(n=28), MemoryProfiler(steps=[2], dirpath=tmp_path), accumulate_grad_batches=3)
    assert phases(tmp_path / "step2-rank0-timeline.csv") == ["forward", "backward", "optimizer"]


@pytest.mark.filterwarnings("ignore:.*normalise over the batch")
def test_parts_of_a_split_step_are_seen_each(tmp_path: Path):
    split = AutoAccumulation(micro_batch_size=2)
    fit(build(), split, MemoryProfiler(steps=[1], dirpath=tmp_path))
    found = phases(tmp_path / "step1-rank0-timeline.csv")
    assert found == ["forward", "backward"] * 2 + ["optimizer"]
    assert "of 2, sorted" in (tmp_path / "step1-rank0-modules.txt").read_text()


class Manual(Blocks):
    """Two optimizers, each with a backward of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        first = torch.optim.SGD(self.stem.parameters(), lr=0.01, momentum=0.9)
        return [first, torch.optim.Adam([*self.blocks.parameters(), *self.head.parameters()])]


def test_manual_optimization_with_two_optimizers_is_seen(tmp_path: Path):
    model = build(Manual)
    fit(model, MemoryProfiler(steps=[1], dirpath=tmp_path))
    path = tmp_path / "step1-rank0-timeline.csv"
    assert phases(path) == ["forward", "backward", "optimizer"] * 2
    assert "of 2, sorted" in (tmp_path / "step1-rank0-modules.txt").read_text()
    rows = read_curve(path)
    stem = sum(p.numel() for p in model.stem.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in model.stem.parameters())]
    adam = sum(2 * p.numel() + 1 for p in rest)
    assert rows[0]["optimizer_state_bytes"] == 4 * (stem + adam)
    for row in rows:
        assert sum(row[f"{name}_bytes"] for name in SIZES) == row["total_bytes"]


class Direct(Manual):
    """Calls backward itself, past Lightning."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_a_backward_past_lightning_is_told_of(tmp_path: Path, lines: Any):
    fit(build(Direct), MemoryProfiler(steps=[1], dirpath=tmp_path))
    assert "self.manual_backward(loss)" in lines()[1]
    text = (tmp_path / "step1-rank0-modules.txt").read_text()
    assert "What is kept is unknown: no backward was seen" in text


@pytest.mark.filterwarnings("ignore:.*normalise over the batch")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_part_that_ran_out_of_memory_is_not_shown(where: str, tmp_path: Path):
    class Large(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.samples = len(batch[0])
            if self.samples > 2 and where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        def on_before_backward(self, loss: Tensor) -> None:
            if where == "backward" and self.samples > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    profiler = MemoryProfiler(steps=[0], dirpath=tmp_path)
    fit(build(Large), AutoAccumulation(micro_batch_size=4), profiler)
    (text,) = (path.read_text() for path in tmp_path.glob("*modules.txt"))
    assert "in forward 1 of 2" in text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
def test_a_compiled_model_is_profiled_without_another_graph(tmp_path: Path):
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    counts = []
    for callbacks in ([], [MemoryProfiler(steps=[0, 2], dirpath=tmp_path)]):
        torch._dynamo.reset()
        graphs.clear()
        model = torch.compile(build(Compilable), backend=backend)
        fit(model, *callbacks, limit_val_batches=0)
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 0
    text = (tmp_path / "step2-rank0-modules.txt").read_text()
    assert "(training_step)" in text
    assert "stem" not in text
    torch._dynamo.reset()


class Compilable(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.head(self.stem(x).tanh()) - y).square().mean()


# Results don't change, and later steps cost nothing


class Logging(Blocks):
    """Draws from all random states and logs what it draws."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        drawn = random.random() + numpy.random.rand() + torch.rand(()).item()
        self.log_dict({"loss": loss, "drawn": drawn}, on_step=True)
        return loss


def trained(*callbacks: pl.Callback) -> tuple[Any, ...]:
    random.seed(2)
    numpy.random.seed(2)
    model, recorder = build(Logging), Recorder()
    fit(model, *callbacks, logger=recorder, log_every_n_steps=1, max_epochs=2)
    points = [(step, point) for step, point in recorder.points if "loss" in point]
    weights = [value.tolist() for value in model.state_dict().values()]
    states = (random.random(), numpy.random.rand(), torch.rand(3).tolist())
    assert len(points) >= 6
    return weights, points, states


OTHERS: dict[str, Any] = {
    "alone": list,
    "checkpointing": lambda: [GradientCheckpointing()],
    "accumulation": lambda: [AutoAccumulation(micro_batch_size=2)],
    "bf16": lambda: [AutomaticMixedPrecision(precision="bf16-mixed")],
    "all": lambda: [
        MemoryMonitor(verbose=False),
        GradientCheckpointing(),
        AutoAccumulation(micro_batch_size=2),
        AutomaticMixedPrecision(precision="bf16-mixed"),
    ],
}


@pytest.mark.filterwarnings("ignore:.*normalise over the batch")
@pytest.mark.parametrize(
    ("others", "is_first"), [*((name, True) for name in OTHERS), ("all", False)]
)
def test_weights_logs_and_random_states_are_those_of_a_run_without(
    others: str, is_first: bool, tmp_path: Path
):
    profiler = MemoryProfiler(steps=[0, 4], dirpath=tmp_path)
    callbacks = OTHERS[others]()
    found = trained(*([profiler, *callbacks] if is_first else [*callbacks, profiler]))
    assert len(names(tmp_path)) == 2 * len(TEXTS)
    assert found == trained(*OTHERS[others]())


def test_pictures_change_no_result(tmp_path: Path, pictures: None):
    found = trained(MemoryProfiler(steps=[1], dirpath=tmp_path))
    assert len(names(tmp_path)) == len(TEXTS + PICTURES)
    assert found == trained()


class Penalised(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        output = self.head(self.stem(x).tanh().sigmoid()).sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        return gradient.square().sum()


def test_a_gradient_of_gradients_is_bit_equal(tmp_path: Path):
    models = [build(Penalised) for _ in range(2)]
    fit(models[0], MemoryProfiler(steps=[0, 1], dirpath=tmp_path))
    fit(models[1])
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert len(names(tmp_path)) == 2 * len(TEXTS)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("is_first", [True, False])
def test_nothing_is_on_in_steps_that_are_not_chosen(tmp_path: Path, is_first: bool):
    seen, profiler = Seen(), MemoryProfiler(steps=[1, 3], dirpath=tmp_path)
    model = build()
    fit(model, *([profiler, seen] if is_first else [seen, profiler]))
    assert seen.middle == {step: step in (1, 3) for step in range(6)}
    assert not is_anything_on(model)


def test_after_the_last_chosen_step_hooks_return_at_once(tmp_path: Path):
    asked: list[str] = []
    profiler = MemoryProfiler(steps=[1], dirpath=tmp_path)

    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:  # whatever a hook asks of it would raise from here
                for name in ("_begin", "_carefully", "_end"):
                    setattr(profiler, name, lambda *_: asked.append("something"))

        def on_train_epoch_end(self, *_: Any) -> None:
            for name in ("_begin", "_carefully", "_end"):
                delattr(profiler, name)

    trainer = fit(build(), Spy(), profiler)
    assert trainer.global_step == 6
    assert names(tmp_path)
    assert asked == []
    assert vars(profiler).keys() >= {"steps", "dirpath", "nvtx", "lines"}


# What goes wrong


class Failing(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise KeyError("mine")
        return loss


def test_a_step_that_raises_leaves_nothing_on(tmp_path: Path):
    model, profiler = build(Failing), MemoryProfiler(steps=[1, 2], dirpath=tmp_path)
    with pytest.raises(KeyError, match="mine"):
        fit(model, profiler)
    assert not is_anything_on(model)
    assert names(tmp_path) == [f"step1-rank0-{name}" for name in TEXTS]
    fit(build(), profiler)
    assert len(names(tmp_path)) == 3 * len(TEXTS)


@pytest.mark.parametrize("where", ["begin", "begin_phase", "finish", "timeline"])
def test_a_profile_that_fails_is_one_warning_and_training_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, model = build(), build()
    fit(plain)
    original = getattr(profiled_step.ProfiledStep, where)

    def fail(self: Any, *args: Any) -> Any:
        original(self, *args)
        raise OSError("disk full\nreally")

    monkeypatch.setattr(profiled_step.ProfiledStep, where, fail)
    text = r"^MemoryProfiler: no profile of step 1: OSError: disk full$"
    if where == "timeline":  # other files are written by then
        text = r"^MemoryProfiler: profile of step 1 is not whole: OSError: disk full; written to "
    with pytest.warns(UserWarning, match=text) as warned:
        fit(model, MemoryProfiler(steps=[1], dirpath=tmp_path))
    assert len([w for w in warned if "MemoryProfiler" in str(w.message)]) == 1
    assert not is_anything_on(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


def test_a_step_that_never_comes_is_one_warning(tmp_path: Path):
    with pytest.warns(UserWarning, match=r"found no step 6, 90: the run ended before step 6") as w:
        fit(build(), MemoryProfiler(steps=[90, 6, 5], dirpath=tmp_path))
    assert len([x for x in w if "MemoryProfiler" in str(x.message)]) == 1
    assert names(tmp_path) == [f"step5-rank0-{name}" for name in TEXTS]


def test_while_another_profiler_runs_operators_are_left_out(tmp_path: Path, lines: Any):
    with profile(activities=[ProfilerActivity.CPU]) as users:
        fit(build(), MemoryProfiler(steps=[1], dirpath=tmp_path))
    assert any(event.key == "aten::addmm" for event in users.key_averages())
    assert names(tmp_path) == ["step1-rank0-modules.txt"]
    assert "another PyTorch profiler was running" in lines()[1]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_beside_the_trainers_own_pytorch_profiler_operators_are_left_out(
    tmp_path: Path, lines: Any
):
    own = PyTorchProfiler(dirpath=tmp_path / "own", filename="own", emit_nvtx=False)
    folder = tmp_path / "mine"
    fit(build(), MemoryProfiler(steps=[0, 1], dirpath=folder), profiler=own)
    assert names(folder) == [f"step{step}-rank0-modules.txt" for step in (0, 1)]
    assert "the Trainer's own profiler runs" in lines()[0]
    assert list((tmp_path / "own").glob("*.json"))


def test_a_step_that_a_hook_cuts_short_is_given_up(tmp_path: Path):

    model = build()
    profiler = MemoryProfiler(steps=[1], dirpath=tmp_path / "files")
    trainer = make_trainer(profiler, accumulate_grad_batches=2)
    model.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None
    with pytest.warns(UserWarning, match="no profile of step 1: a hook ended the epoch"):
        trainer.fit(model)
    assert trainer.global_step == 1
    assert not (tmp_path / "files").exists()
    assert not is_anything_on(model)


def test_a_hook_that_fails_in_the_model_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise OSError("ours")

    monkeypatch.setattr("lightning_memopt.core.module_rows.RunningModules.enter", fail)
    model, plain = build(), build()
    fit(plain)
    with pytest.warns(UserWarning, match="no profile of step 1: OSError: ours") as warned:
        fit(model, MemoryProfiler(steps=[1], dirpath=tmp_path))
    assert len([w for w in warned if "MemoryProfiler" in str(w.message)]) == 1
    assert not is_anything_on(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


def test_after_a_write_error_the_warning_tells_which_files_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(timeline: Any, path: Path) -> None:
        path.write_text("half of")
        raise OSError("disk full")

    monkeypatch.setattr(_profile_report, "write_curve", fail)
    text = (
        r"^MemoryProfiler: profile of step 1 is not whole: OSError: disk full; written to "
        rf"{tmp_path}/step1-rank0-\*: modules.txt, operators.txt, trace.json.gz$"
    )
    with pytest.warns(UserWarning, match=text):
        fit(build(), MemoryProfiler(steps=[1], dirpath=tmp_path))
    assert names(tmp_path) == [f"step1-rank0-{x}" for x in TEXTS if x != "timeline.csv"]


def test_the_step_is_freed_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    close = profiled_step.ProfiledStep.close

    def noted(self: Any) -> None:
        made.append(weakref.ref(self))
        close(self)

    monkeypatch.setattr(profiled_step.ProfiledStep, "close", noted)
    gc.disable()
    try:
        fit(build(), MemoryProfiler(steps=[1], dirpath=tmp_path))
        assert [reference() for reference in made] == [None]
    finally:
        gc.enable()


class Copying(pl.Callback):
    """Copies the other callback in the middle of a step."""

    def __init__(self, profiler: MemoryProfiler) -> None:
        self.profiler = profiler
        self.copies: list[Any] = []

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            assert self.profiler._profiled is not None
            pickled = pickle.loads(pickle.dumps(self.profiler))
            self.copies = [copy.deepcopy(self.profiler), pickled]


def test_a_copy_in_the_middle_of_a_step_is_one_as_built(tmp_path: Path):
    profiler = MemoryProfiler(steps=[1], dirpath=tmp_path)
    copying = Copying(profiler)
    fit(build(), profiler, copying)
    built = {"steps", "dirpath", "nvtx", "lines"}
    trainers = {"log", "log_dict"}
    assert [vars(each).keys() - trainers for each in copying.copies] == [built] * 2
    fit(build(), copying.copies[0])
    assert len(names(tmp_path)) == 2 * len(TEXTS)


# Nsight Systems


class FakeNvtx:
    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def range_push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append(tuple(self.open))

    def range_pop(self) -> None:
        self.open.pop()


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    """Stands in for CUDA's, which the profiler then finds on a CPU."""
    fake = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    monkeypatch.setattr(MemoryProfiler, "setup", quiet_setup(MemoryProfiler.setup))
    return fake


def quiet_setup(setup: Any) -> Any:
    def as_on_cuda(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nvtx, asked = False, self.nvtx
        setup(self, *args, **kwargs)
        self.nvtx = asked

    return as_on_cuda


def test_ranges_are_nested_and_balanced_in_chosen_steps_only(nvtx: FakeNvtx, tmp_path: Path):
    fit(build(), MemoryProfiler(steps=[1, 3], dirpath=tmp_path, nvtx=True))
    assert nvtx.open == []
    tops = [stack for stack in nvtx.seen if len(stack) == 1]
    assert tops == [("step 1",), ("step 3",)]
    seen = nvtx.seen[: len(nvtx.seen) // 2]
    assert [stack[1] for stack in seen if len(stack) == 2] == ["forward", "backward", "optimizer"]
    assert ("step 1", "forward", "blocks.0", "blocks.0.linear") in seen
    assert nvtx.seen.count(("step 3", "forward", "head")) == 1


@pytest.mark.parametrize("failing", [Failing, Manual])
def test_ranges_are_balanced_after_an_exception_and_in_manual_optimization(
    failing: type[Blocks], nvtx: FakeNvtx, tmp_path: Path
):
    profiler = MemoryProfiler(steps=[2], dirpath=tmp_path, nvtx=True)
    if failing is Manual:
        fit(build(failing), profiler)
        inner = [stack[1] for stack in nvtx.seen if len(stack) == 2]
        assert inner == ["forward", "backward", "optimizer"] * 2
        assert all(stack[1] == "forward" for stack in nvtx.seen if len(stack) > 2)
    else:
        with pytest.raises(KeyError, match="mine"):
            fit(build(failing), profiler)
    assert ("step 2", "forward", "stem") in nvtx.seen
    assert nvtx.open == []


def test_a_range_that_a_failing_module_left_open_ends_with_the_one_around_it(nvtx: FakeNvtx):
    ranges = nvtx_ranges.NvtxRanges()
    for name in ("step", "a", "b", "c"):
        ranges.push(name)
    ranges.pop("nobody's")
    assert nvtx.open == ["step", "a", "b", "c"]
    ranges.pop("a")
    assert nvtx.open == ["step"]
    ranges.close()
    assert nvtx.open == []


# Arguments


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"steps": 5}, TypeError, r"^`steps` must be a list of steps such as `\[5, 6\]`, got 5"),
        ({"steps": []}, ValueError, r"^`steps` must hold at least one step"),
        ({"steps": [1.5]}, TypeError, r"^`steps \(step\)` must be an `int` of at least 0"),
        ({"steps": (3, -1)}, ValueError, r"^`steps \(step\)` must be at least 0, got -1"),
        ({"dirpath": 3}, TypeError, r"^`dirpath` must be a path.* or `None`, got 3"),
        (
            {"dirpath": ""},
            ValueError,
            r"^`dirpath` must be a path on.* or `None`, got ''",
        ),
        ({"nvtx": "yes"}, TypeError, r"^`nvtx` must be `True` or `False`"),
        ({"lines": 3}, TypeError, r"^`lines` must be a list of `str`"),
        ({"lines": "training_step"}, TypeError, r"^`lines` must be a list of `str`"),
        ({"lines": []}, ValueError, r"^`lines` must name something"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(kwargs: Any, error: Any, text: str):
    with pytest.raises(error, match=text) as raised:
        MemoryProfiler(**kwargs)
    assert "\n" not in str(raised.value)


def test_steps_may_be_a_range():
    assert MemoryProfiler(steps=range(5, 7)).steps == [5, 6]
    steps = [3]
    assert MemoryProfiler(steps=steps).steps is steps


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"nvtx": True}, r"^`MemoryProfiler\(nvtx=True\)` needs CUDA, but training runs on `cpu`"),
        (
            {"lines": ["training_step"]},
            r"^`MemoryProfiler\(lines=\['training_step'\]\)` needs CUDA",
        ),
    ],
)
def test_what_needs_cuda_is_refused_elsewhere(kwargs: Any, text: str):
    trainer = make_trainer(MemoryProfiler(**kwargs))
    with pytest.raises(MisconfigurationException, match=text):
        trainer.fit(build())
    assert trainer.global_step == 0


# Several ranks


def fit_rank(rank: int) -> Any:
    _profile_report.has_pictures = bool  # in a process of its own
    torch.manual_seed(0)
    model = Blocks()
    trainer = make_rank_trainer(
        MemoryProfiler(steps=[1]),
        logger=CSVLogger("logs", name="ranks", version="a"),
        log_every_n_steps=1,
    )
    trainer.fit(model)
    return {"folder": str(trainer.log_dir), "is_on": is_anything_on(model)}


def test_each_rank_writes_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ranks = run_two_ranks(fit_rank, tmp_path)
    assert [rank["is_on"] for rank in ranks] == [False, False]
    assert ranks[0]["folder"] == ranks[1]["folder"]
    folder = tmp_path / ranks[0]["folder"] / "memory_profile"
    assert names(folder) == [f"step1-rank{rank}-{name}" for rank in (0, 1) for name in TEXTS]
    for rank in (0, 1):
        rows = read_curve(folder / f"step1-rank{rank}-timeline.csv")
        assert rows[-1]["gradients_bytes"] == rows[-1]["optimizer_state_bytes"] > 0


def test_workers_of_a_loader_go_well_with_it(tmp_path: Path):
    model = build()
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    model.train_dataloader = lambda: DataLoader(data, batch_size=4, num_workers=1)
    fit(model, MemoryProfiler(steps=[1, 2], dirpath=tmp_path))
    assert len(names(tmp_path)) == 2 * len(TEXTS)
