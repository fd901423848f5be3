"""The anatomy that `MemoryMonitor` finds in the first steps of real fits, and its harmlessness."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import lightning_memopt
from lightning_memopt import (
    AutoAccumulation,
    AutomaticMixedPrecision,
    GradientAccumulation,
    GradientCheckpointing,
    MemoryMonitor,
    MemoryProfiler,
)
from lightning_memopt.callbacks import _anatomy_report, _step_anatomy
from lightning_memopt.core.memory_trace import is_in_dispatch_mode
from tests.models import make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

WIDTH = 64
WEIGHTS = 4 * (4 * (WIDTH * WIDTH + WIDTH))  # bytes of four layers
ROW = 4 * WIDTH


class Net(pl.LightningModule):
    """Four layers with dropout and BatchNorm."""

    automatic = True

    def __init__(self, make_optimizer: Any = torch.optim.Adam, n: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        )
        self.rest = nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(WIDTH, affine=False))
        self.make_optimizer, self.n = make_optimizer, n
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.rest(self.layers(batch[0])).square().mean() + batch[0].mean()
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.rest(self.layers(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(self.n, WIDTH)), batch_size=8)

    val_dataloader = train_dataloader


class Manual(Net):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.layers(batch[0]).square().mean())
            optimizer.step()


def fit(model: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    """Train from a fixed seed."""
    pl.seed_everything(3)
    trainer = make_trainer(*callbacks, **kwargs)
    trainer.fit(model)
    return trainer


def found_in(model: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> dict[str, Any]:
    """Train with a monitor and return the anatomy."""
    monitor = MemoryMonitor(verbose=False)
    fit(model, monitor, *callbacks, **kwargs)
    anatomy: dict[str, Any] = monitor.summary()["anatomy"]
    return anatomy


def size_of(anatomy: dict[str, Any], kind: str) -> int:
    """Return the bytes of one use."""
    return sum(part["size_bytes"] for part in anatomy["parts"] if part["kind"] == kind)


@pytest.mark.parametrize(
    ("make_optimizer", "states"),
    [
        (torch.optim.SGD, 0),
        (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.Adam, 2),
    ],
)
def test_every_part_of_a_fit_has_its_bytes(make_optimizer: Any, states: int) -> None:
    anatomy = found_in(Net(make_optimizer))
    assert size_of(anatomy, "parameters") == WEIGHTS
    assert size_of(anatomy, "gradients") == WEIGHTS
    state = size_of(anatomy, "optimizer state")
    assert states * WEIGHTS <= state <= states * WEIGHTS + 8 * 8
    assert size_of(anatomy, "buffers") == 2 * ROW + 8
    assert size_of(anatomy, "batch") == 8 * ROW
    assert sum(part["size_bytes"] for part in anatomy["parts"]) == anatomy["peak_bytes"]
    kept = {row["module"]: row["size_bytes"] for row in anatomy["kept_by_module"]}
    assert kept["layers.2.1"] == 8 * ROW  # the output of a `Tanh`


def test_it_is_that_of_a_step_by_itself() -> None:
    model = Net()
    anatomy = found_in(model, max_epochs=1, limit_train_batches=2)
    alone = Net()
    alone.log = lambda *args: None  # type: ignore[method-assign, assignment]
    expected = lightning_memopt.anatomy(
        alone, torch.optim.Adam(alone.parameters(), lr=0.01), [torch.rand(8, WIDTH)]
    )
    assert size_of(anatomy, "gradients") == expected.size_of("gradients")
    assert anatomy["phase"] == expected.phase
    # Lightning keeps the loss and what was logged.
    assert abs(anatomy["kept_bytes"] - expected.kept_bytes) <= 64
    assert abs(anatomy["peak_bytes"] - expected.peak) <= 64


@pytest.mark.parametrize("kwargs", [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.1},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true"},
    {"val_check_interval": 1},
    {"max_steps": 1, "max_epochs": -1},
    {"max_epochs": 3},
])  # fmt: skip
def test_a_run_computes_the_same_to_the_last_bit(kwargs: dict[str, Any]) -> None:
    plain, watched = Net(), Net()
    watched.load_state_dict(plain.state_dict())
    fit(plain, **kwargs)
    after_plain = torch.rand(3)
    trainer = fit(watched, MemoryMonitor(verbose=False), **kwargs)
    assert torch.equal(after_plain, torch.rand(3))
    assert torch.equal(torch.stack(plain.losses), torch.stack(watched.losses))
    pairs = zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not is_in_dispatch_mode()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    assert trainer.optimizers


def test_one_step_is_enough() -> None:
    anatomy = found_in(Net(), max_steps=1)
    assert size_of(anatomy, "optimizer state") >= 2 * WEIGHTS


def test_accumulation_adds_no_batch_and_keeps_gradients() -> None:
    anatomy = found_in(Net(torch.optim.SGD), accumulate_grad_batches=3)
    assert size_of(anatomy, "gradients") == WEIGHTS
    assert anatomy["kept_bytes"] < 8 * ROW * 8


def test_mixed_precision_keeps_parameters_in_float32() -> None:
    anatomy = found_in(Net(), precision="bf16-mixed")
    types = {(part["kind"], part["dtype"]) for part in anatomy["parts"]}
    assert size_of(anatomy, "parameters") == WEIGHTS
    assert ("parameters", "float32") in types
    assert ("parameters", "bfloat16") not in types
    assert any(row["dtype"] == "bfloat16" for row in anatomy["kept_by_dtype"])


def test_checkpointing_is_seen_in_what_is_kept() -> None:
    plain, checkpointed = found_in(Net()), found_in(Net(), GradientCheckpointing("layers.*"))
    assert checkpointed["kept_bytes"] < plain["kept_bytes"]


@pytest.mark.parametrize(
    "callbacks",
    [
        (GradientAccumulation(2),),
        (AutoAccumulation(micro_batch_size=4),),
        (AutomaticMixedPrecision("bf16-mixed"),),
        (MemoryProfiler(steps=[0, 1]),),
    ],
    ids=lambda callbacks: type(callbacks[0]).__name__,
)
def test_it_goes_with_the_suite(callbacks: tuple[pl.Callback, ...], tmp_path: Any) -> None:
    copies = [copy.deepcopy(each) for each in callbacks]
    plain, watched = Net(), Net()
    plain.rest = watched.rest = nn.Sequential()  # of each sample by itself
    watched.load_state_dict(plain.state_dict())
    fit(plain, *callbacks, default_root_dir=tmp_path / "a")
    monitor = MemoryMonitor(verbose=False)
    fit(watched, *copies, monitor, default_root_dir=tmp_path / "b")
    pairs = zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert size_of(monitor.summary()["anatomy"], "parameters") == WEIGHTS
    assert not is_in_dispatch_mode()


@pytest.mark.parametrize("model", [
    Manual(), Net(lambda p, lr: torch.optim.LBFGS(p, lr, max_iter=3))
], ids=["manual", "LBFGS"])  # fmt: skip
def test_other_ways_to_step(model: pl.LightningModule) -> None:
    anatomy = found_in(model)
    assert size_of(anatomy, "parameters") == WEIGHTS
    assert anatomy["peak_bytes"] > 3 * WEIGHTS


def test_it_is_printed_and_shown_in_tensorboard(tmp_path: Any, capsys: Any) -> None:
    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    fit(Net(), MemoryMonitor(), logger=logger)
    printed = capsys.readouterr().out
    assert "where the memory of a step is" in printed
    assert "optimizer state" in printed
    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"tensors": 0}).Reload()
    (text,) = events.Tensors("memory/anatomy/text_summary")
    page = text.tensor_proto.string_val[0].decode()
    assert "at the peak" in page
    assert text.step == 1
    pytest.importorskip("matplotlib")
    (picture,) = events.Images("memory/anatomy")
    assert picture.width == 700


def test_it_ends_in_advice(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = MemoryMonitor(advice=True)
    model = Net(n=4096)
    model.train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        TensorDataset(torch.rand(4096, WIDTH)), batch_size=2048
    )
    fit(model, monitor, limit_val_batches=0)
    assert "what would save most" in capsys.readouterr().out
    advice = monitor.summary()["anatomy"]["advice"]
    assert "split the micro-batch in 4" in {each["what"] for each in advice}


def test_advice_that_fails_costs_nothing_else() -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float(self.losses[-1]) > -1)

    monitor = MemoryMonitor(verbose=False, advice=True)
    fit(Reads(), monitor)
    assert monitor.summary()["anatomy"]["advice"] == []


def test_advice_leaves_a_run_as_it_is() -> None:
    plain, watched = Net(), Net()
    watched.load_state_dict(plain.state_dict())
    fit(plain)
    fit(watched, MemoryMonitor(verbose=False, advice=True))
    pairs = zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_without_advice_the_users_step_runs_as_often_as_ever() -> None:
    model = Net()
    fit(model, MemoryMonitor())
    assert len(model.losses) == model.n // 8


def test_it_can_be_left_out(capsys: Any) -> None:
    monitor = MemoryMonitor(anatomy=False)
    fit(Net(), monitor)
    assert "anatomy" not in monitor.summary()
    assert "where the memory" not in capsys.readouterr().out


def test_a_quiet_monitor_prints_nothing(capsys: Any) -> None:
    fit(Net(), MemoryMonitor(verbose=False))
    assert capsys.readouterr().out == ""


class Elsewhere(TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Enters(pl.Callback):
    """Enters a mode in each batch, and leaves it after the monitor's end of the batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode: Any = Elsewhere()
        self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        assert is_in_dispatch_mode()
        self.mode.__exit__(None, None, None)


def test_a_mode_that_crosses_the_trace_stays_as_it_was() -> None:
    anatomy = found_in(Net(), Enters())
    assert size_of(anatomy, "gradients") == WEIGHTS
    assert not is_in_dispatch_mode()


def test_a_mode_from_before_is_not_disturbed(caplog: Any) -> None:
    monitor = MemoryMonitor()
    with caplog.at_level("INFO"), Elsewhere():  # type: ignore[no-untyped-call]
        fit(Net(), monitor)
    assert "no anatomy of a step, as another dispatch mode is active" in caplog.text
    assert "anatomy" not in monitor.summary()


def test_compiled_code_stays_compiled(caplog: Any) -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph

    model = Net()
    model.layers = torch.compile(model.layers, backend=backend)  # type: ignore[assignment]
    monitor = MemoryMonitor()
    with caplog.at_level("INFO"):
        fit(model, monitor)
    assert calls
    assert "no anatomy of a step, as compiled code" in caplog.text
    assert "anatomy" not in monitor.summary()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_nothing_is_left_when_a_step_raises(at: int) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == at:
                raise KeyError("a mistake")
            return loss

    model, monitor = Fails(), MemoryMonitor(verbose=False)
    with pytest.raises(KeyError, match="a mistake"):
        fit(model, monitor)
    assert not is_in_dispatch_mode()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert ("anatomy" in monitor.summary()) == (at == 3)


def test_a_batch_that_is_skipped_is_no_step() -> None:
    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    anatomy = found_in(Skips(), max_epochs=3)
    assert size_of(anatomy, "parameters") == WEIGHTS
    assert not is_in_dispatch_mode()


def test_a_second_fit_has_its_own() -> None:
    monitor = MemoryMonitor(verbose=False)
    fit(Net(), monitor)
    first = monitor.summary()["anatomy"]
    fit(Net(torch.optim.SGD), monitor)
    second = monitor.summary()["anatomy"]
    assert size_of(first, "optimizer state") > 0
    assert size_of(second, "optimizer state") == 0


def ranks(path: Path, rank: int) -> int:
    """Train on two ranks and return the bytes of the parameters that this one has found."""
    logger = TensorBoardLogger(path, name=None, version="run")
    monitor = MemoryMonitor(verbose=False)
    pl.seed_everything(3)
    make_rank_trainer(monitor, logger=logger).fit(Net())
    return size_of(monitor.summary()["anatomy"], "parameters")


def test_all_ranks_trace_and_the_first_shows(tmp_path: Path) -> None:
    assert run_two_ranks(partial(ranks, tmp_path), tmp_path) == [WEIGHTS, WEIGHTS]
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert "memory/anatomy/text_summary" in events.Tags()["tensors"]


def test_without_matplotlib_there_is_the_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_anatomy_report, "has_pictures", lambda: False)
    fit(Net(), MemoryMonitor(), logger=TensorBoardLogger(tmp_path, name=None, version="run"))
    tags = EventAccumulator(str(tmp_path / "run")).Reload().Tags()
    assert "memory/anatomy/text_summary" in tags["tensors"]
    assert tags["images"] == []


class _Odd(Net):
    """Holds a buffer whose size no one knows before its module has run."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.UninitializedBuffer()


def test_a_buffer_without_a_size_is_left_out() -> None:
    assert size_of(found_in(_Odd()), "parameters") == WEIGHTS


@pytest.mark.parametrize("step", ["label_run", "tensors_by_kind", "read_anatomy", "show_anatomy"])
def test_what_fails_in_the_anatomy_fails_no_run(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("of its own\nsecond line")

    monkeypatch.setattr(_step_anatomy, step, fail)
    plain = Net()
    watched = copy.deepcopy(plain)
    fit(plain)
    with caplog.at_level("INFO"):
        fit(watched, MemoryMonitor(verbose=False))
    assert "no anatomy of a step, as ValueError: of its own" in caplog.text
    assert not is_in_dispatch_mode()
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
