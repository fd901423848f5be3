from __future__ import annotations

import csv
import gc
import logging
import multiprocessing
import os
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_memopt.callbacks.gradient_accumulation import GradientAccumulation
from lightning_memopt.callbacks.memory_monitor import MemoryMonitor
from lightning_memopt.core import host_memory, peaks
from lightning_memopt.core.units import GIB, MIB
from tests.models import OOM_TEXT, Blocks, Recorder, Unit, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

ALLOCATED, PEAK = "memory/allocated_gib", "memory/peak_allocated_gib"
STEP_KEYS = {ALLOCATED, PEAK, "memory/reserved_gib", "memory/device_used_gib"} | {
    "memory/fragmentation"  # a share; retries of an allocator are unknown on a CPU
}
PHASES = ("forward", "backward", "optimizer")
PHASE_KEYS = {f"memory_phase/{phase}_peak_gib" for phase in PHASES}
TEMPORARY = 256 * MIB
SLACK_GIB = 16 * MIB / GIB

Points = list[tuple[int | None, dict[str, float]]]


def board(folder: Path, **kwargs: Any) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name=None, version="run", **kwargs)


def read_board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return x and value of all points of a TensorBoard run, by tag."""
    events = EventAccumulator(str(folder / "run")).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_events(folder: Path) -> list[Any]:
    """Return the records of the event files that hold scalars, as they are."""
    (path,) = (folder / "run").glob("events.out.tfevents.*")
    events = LegacyEventFileLoader(str(path)).Load()
    return [
        event for event in events if any(x.HasField("simple_value") for x in event.summary.value)
    ]


def use_temporarily(size: int = TEMPORARY) -> None:
    torch.empty(size, dtype=torch.uint8).fill_(1)


def monitored(
    model: pl.LightningModule, *callbacks: pl.Callback, monitor: Any = None, **kwargs: Any
) -> Recorder:
    """Fit a model and return what the monitor logged."""
    recorder = Recorder()
    monitor = monitor or MemoryMonitor(verbose=False)
    make_trainer(*callbacks, monitor, logger=recorder, log_every_n_steps=1, **kwargs).fit(model)
    return recorder


# One point an optimizer step, at the x of `self.log`


FACTORS: dict[str, Callable[[], tuple[list[pl.Callback], dict[str, Any]]]] = {
    "trainer": lambda: ([], {"accumulate_grad_batches": 4}),
    "callback": lambda: ([GradientAccumulation(4)], {}),
}
by_either_factor = pytest.mark.parametrize("factor", FACTORS)


@by_either_factor
@pytest.mark.parametrize("log_every_n_steps", [1, 50])
def test_one_point_an_optimizer_step_whatever_the_trainers_interval(factor, log_every_n_steps):
    callbacks, kwargs = FACTORS[factor]()
    recorder = Recorder()
    kwargs |= {"logger": recorder, "log_every_n_steps": log_every_n_steps}
    trainer = make_trainer(*callbacks, MemoryMonitor(verbose=False), **kwargs)
    trainer.fit(Unit(n=16))
    assert trainer.global_step == 4
    for key in STEP_KEYS | PHASE_KEYS:
        assert recorder.steps(key) == [0, 1, 2, 3], key


@by_either_factor
@pytest.mark.parametrize("is_first", [True, False])
def test_a_csv_logger_gets_each_point_once_as_python_floats(factor, is_first, tmp_path):
    logger = CSVLogger(tmp_path, name=None, version="run")
    seen: Points = []
    stock = logger.log_metrics

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        seen.append((step, dict(metrics)))
        stock(metrics, step)

    logger.log_metrics = log_metrics
    callbacks, kwargs = FACTORS[factor]()
    callbacks.insert(0 if is_first else len(callbacks), MemoryMonitor(verbose=False))
    make_trainer(*callbacks, logger=logger, log_every_n_steps=1, **kwargs).fit(Unit(n=16))
    ours = [(step, point) for step, point in seen if ALLOCATED in point]
    assert [step for step, _ in ours] == [0, 1, 2, 3]
    assert all(set(point) == STEP_KEYS | PHASE_KEYS for _, point in ours)
    assert {type(value) for _, point in ours for value in point.values()} == {float}
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row[ALLOCATED]]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row[PEAK]) for row in rows] == [point[PEAK] for _, point in ours]


@by_either_factor
def test_tensorboard_has_one_event_a_step_with_all_its_values(factor, tmp_path):
    recorder = Recorder()
    callbacks, kwargs = FACTORS[factor]()
    loggers = [board(tmp_path), recorder]
    make_trainer(*callbacks, MemoryMonitor(verbose=False), logger=loggers, **kwargs).fit(Unit(n=16))
    events = [e for e in read_events(tmp_path) if any(x.tag == ALLOCATED for x in e.summary.value)]
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert all({x.tag for x in e.summary.value} == STEP_KEYS | PHASE_KEYS for e in events)
    times = [event.wall_time for event in events]
    assert times == sorted(times)
    found = read_board(tmp_path)
    for key in STEP_KEYS | PHASE_KEYS:
        assert [step for step, _ in found[key]] == [0, 1, 2, 3]
        assert [value for _, value in found[key]] == pytest.approx(recorder.values(key), rel=1e-6)


def test_there_are_at_most_six_keys_of_a_step_and_each_has_its_unit_or_is_a_share():
    (_, point), *_ = monitored(Unit(n=1)).of(ALLOCATED)
    keys = {key for key in point if key.startswith("memory/")}
    assert keys == STEP_KEYS
    assert len(keys) <= 6
    assert {key for key in point if not key.endswith("_gib")} == {"memory/fragmentation"}
    assert 0 <= point["memory/fragmentation"] <= 1


def test_retries_of_an_allocator_are_logged_where_they_are_known(monkeypatch):
    class Retrying:
        reads = 7

        def __init__(self, reader: Any) -> None:
            self.reset_peak, self._read = reader.reset_peak, reader.read

        def read(self) -> Any:
            object.__setattr__(reading := self._read(), "alloc_retries", Retrying.reads)
            return reading

    class Failing(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            Retrying.reads += batch_idx
            return super().training_step(batch, batch_idx)

    counter = peaks.peak_counter(torch.device("cpu"))
    monkeypatch.setattr(counter, "reader", Retrying(counter.reader))
    recorder = monitored(Failing(n=3))
    assert recorder.values("memory/alloc_retries") == [0.0, 1.0, 3.0]
    assert {k for k in recorder.points[0][1] if k.startswith("memory/")} == STEP_KEYS | {
        "memory/alloc_retries"
    }


def test_a_prefix_of_a_board_is_before_every_key(tmp_path):
    logger = board(tmp_path, prefix="p")
    make_trainer(MemoryMonitor(verbose=False), logger=logger).fit(Unit(n=3))
    keys = {f"p-{key}" for key in STEP_KEYS | PHASE_KEYS}
    assert {tag for tag in read_board(tmp_path) if "memory" in tag} == keys


def test_several_loggers_have_the_same_points(tmp_path):
    recorder = Recorder()
    loggers = [board(tmp_path / "1"), recorder, board(tmp_path / "2")]
    make_trainer(MemoryMonitor(verbose=False), logger=loggers).fit(Unit(n=5))
    first, second = read_board(tmp_path / "1"), read_board(tmp_path / "2")
    assert first == second
    for key in STEP_KEYS | PHASE_KEYS:
        assert [x for x, _ in first[key]] == recorder.steps(key) == [0, 1, 2, 3, 4]


def test_a_board_that_overrides_log_metrics_gets_every_point_through_it(tmp_path):
    seen: Points = []

    class Mine(TensorBoardLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.append((step, dict(metrics)))
            super().log_metrics(metrics, step)

    logger = Mine(tmp_path, name=None, version="run")
    make_trainer(MemoryMonitor(verbose=False), logger=logger).fit(Blocks(n=8))
    for key in (ALLOCATED, "memory_val/allocated_gib"):
        assert [step for step, point in seen if key in point] == [0, 1]
        assert [x for x, _ in read_board(tmp_path)[key]] == [0, 1]


def test_without_a_logger_the_summary_has_the_data():
    monitor = MemoryMonitor(verbose=False)
    assert monitor.summary() == {}
    make_trainer(monitor, logger=False, accumulate_grad_batches=4).fit(Unit(n=16))
    summary = monitor.summary()
    assert summary["device"] == "cpu"
    assert summary["steps"] == 4
    assert set(summary["phases"]) == {"between", *PHASES}
    assert summary["peak_bytes"] == max(x["peak_bytes"] for x in summary["phases"].values())
    assert summary["allocated_bytes"] > 0
    assert 0 < summary["reserved_bytes"] <= summary["peak_bytes"] + 16 * MIB
    assert summary["peak_interrupted"] is False


def test_a_summary_is_a_copy():
    monitor = MemoryMonitor(verbose=False)
    monitor.summary()["steps"] = 99
    assert MemoryMonitor().summary() == {}
    make_trainer(monitor).fit(Unit(n=3))
    monitor.summary().clear()
    assert monitor.summary()["steps"] == 3


def test_a_summary_can_be_read_while_the_run_goes_on():
    monitor, seen = MemoryMonitor(verbose=False), []

    class Model(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append(monitor.summary()["steps"])
            return super().training_step(batch, batch_idx)

    assert monitored(Model(n=4), monitor=monitor).steps(ALLOCATED) == [0, 1, 2, 3]
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("every_n_steps", [1, 3, 100])
def test_the_callbacks_own_interval_decides(every_n_steps):
    monitor = MemoryMonitor(every_n_steps=every_n_steps, verbose=False)
    recorder = monitored(Unit(n=20), monitor=monitor, accumulate_grad_batches=2)
    assert recorder.steps(PEAK) == list(range(0, 10, every_n_steps))
    assert monitor.summary()["steps"] == len(recorder.steps(PEAK))


def test_a_peak_in_a_step_that_is_not_read_counts_for_the_run_alone():
    class Model(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            use_temporarily(TEMPORARY if batch_idx == 1 else 1)
            return super().training_step(batch, batch_idx)

    monitor = MemoryMonitor(every_n_steps=3, verbose=False)
    before = host_memory.resident_bytes()
    recorder = monitored(Model(n=4), monitor=monitor)
    assert recorder.steps(PEAK) == [0, 3]
    assert max(recorder.values(PEAK)) < before / GIB + SLACK_GIB
    summary = monitor.summary()
    assert summary["peak_bytes"] >= before + TEMPORARY - 16 * MIB
    assert summary["peak_phase"] == "between"


def test_without_phases_a_step_has_its_whole_peak_and_no_keys_of_phases():
    monitor = MemoryMonitor(phases=False, verbose=False)
    model = Spending("backward", 1)
    before = host_memory.resident_bytes() / GIB
    recorder = monitored(model, monitor=monitor)
    assert {key for _, point in recorder.points for key in point} == STEP_KEYS
    assert recorder.steps(PEAK) == [0, 1, 2]
    grown = [peak - before for peak in recorder.values(PEAK)]
    assert grown[1] == pytest.approx(TEMPORARY / GIB, abs=SLACK_GIB)
    assert max(grown[0], grown[2]) < SLACK_GIB
    assert set(monitor.summary()["phases"]) == {"between", "step"}


def test_what_comes_between_two_steps_is_in_the_forward_of_the_next():
    class Between(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            use_temporarily(TEMPORARY if args[-1] == 0 else 1)

    monitor, recorder = MemoryMonitor(verbose=False), Recorder()
    before = host_memory.resident_bytes() / GIB
    make_trainer(monitor, Between(), logger=recorder).fit(Unit(n=3))
    grown = [peak - before for peak in recorder.values("memory_phase/forward_peak_gib")]
    assert grown == pytest.approx([0, TEMPORARY / GIB, 0], abs=SLACK_GIB)
    assert monitor.summary()["peak_phase"] == "forward"


# Every way to train


class Stream(IterableDataset):
    """A data set without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(torch.ones(self.n, 1))


class UnsizedUnit(Unit):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(self.n), batch_size=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step([batch], batch_idx)


@pytest.mark.parametrize("unit", [Unit, UnsizedUnit])
@pytest.mark.parametrize(("n", "factor"), [(10, 4), (3, 8), (7, 1)])
def test_short_windows_have_their_point_and_x_goes_on_over_epochs(unit, n, factor):
    model = unit(n=n)
    recorder = monitored(model, accumulate_grad_batches=factor, max_epochs=3)
    assert len(model.grads) == 3 * -(-n // factor)
    assert recorder.steps(ALLOCATED) == list(range(len(model.grads)))


@pytest.mark.parametrize("monitor_first", [True, False])
def test_a_factor_that_changes_while_training_keeps_one_point_a_step(monitor_first):
    accumulation = GradientAccumulation({0: 4, 1: 2})

    class Ask(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if (trainer.current_epoch, args[-1]) == (1, 3):
                accumulation.set_steps(3)

    model, monitor = Unit(n=12), MemoryMonitor(verbose=False)
    callbacks = [monitor, accumulation] if monitor_first else [accumulation, monitor]
    recorder = Recorder()
    make_trainer(*callbacks, Ask(), logger=recorder, max_epochs=2).fit(model)
    assert len(model.grads) == 3 + 5  # 3 windows of 4, then 3 of 2 and 2 of 3
    assert recorder.steps(ALLOCATED) == list(range(8))


class ByHand(Blocks):
    """Trains two halves with an optimizer each, by hand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parts = (self.stem, self.head)
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_two_optimizers_by_hand_have_one_point_a_batch():
    recorder = Recorder()
    trainer = make_trainer(MemoryMonitor(verbose=False), logger=recorder, limit_val_batches=0)
    trainer.fit(ByHand(n=16))
    assert trainer.global_step == 8
    for key in STEP_KEYS | PHASE_KEYS:
        assert recorder.steps(key) == [0, 1, 2, 3], key


def test_an_optimizer_that_asks_for_the_loss_many_times_has_one_point_a_step():
    class Model(Blocks):
        calls = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.calls += 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    model = Model(n=12)
    recorder = monitored(model, limit_val_batches=0)
    assert model.calls > 3
    for key in STEP_KEYS | PHASE_KEYS:
        assert recorder.steps(key) == [0, 1, 2], key


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("phases", [True, False])
def test_a_step_without_a_loss_has_its_point(phases):
    class Model(Blocks):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    monitor = MemoryMonitor(phases=phases, verbose=False)
    recorder = monitored(Model(n=12), monitor=monitor, limit_val_batches=0)
    assert recorder.steps(PEAK) == [0, 1, 2]
    points = [set(point) - STEP_KEYS for _, point in recorder.of(PEAK)]
    expected = [PHASE_KEYS, {"memory_phase/forward_peak_gib"}, PHASE_KEYS]
    assert points == (expected if phases else [set()] * 3)


@pytest.mark.parametrize("phases", [True, False])
def test_a_rest_of_an_epoch_that_is_skipped_is_no_part_of_the_next_step(phases):
    class Model(Unit):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 1 else None

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                use_temporarily()

    before = host_memory.resident_bytes() / GIB
    monitor = MemoryMonitor(phases=phases, verbose=False)
    recorder = monitored(Model(n=4), monitor=monitor, accumulate_grad_batches=2, max_epochs=2)
    # Lightning doesn't count the window that was skipped as a step.
    assert recorder.steps(PEAK) == [0, 1]
    assert max(recorder.values(PEAK)) < before + SLACK_GIB
    assert monitor.summary()["phases"]["between"]["peak_bytes"] > before * GIB + TEMPORARY / 2


def test_a_run_that_ends_within_a_window_has_the_points_of_its_steps():
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.should_stop = args[-1] == 5

    model = Unit(n=16)
    recorder = monitored(model, Stop(), accumulate_grad_batches=4)
    assert recorder.steps(ALLOCATED) == list(range(len(model.grads)))
    assert recorder.steps(ALLOCATED)[:1] == [0]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create")
def test_a_resumed_run_goes_on_with_its_x(tmp_path):
    path = tmp_path / "last.ckpt"
    recorder = Recorder()
    trainer = make_trainer(MemoryMonitor(verbose=False), logger=recorder)
    trainer.fit(Unit(n=4))
    trainer.save_checkpoint(path)
    resumed = Recorder()
    again = make_trainer(MemoryMonitor(verbose=False), logger=resumed, max_epochs=2)
    again.fit(Unit(n=4), ckpt_path=path)
    assert recorder.steps(ALLOCATED) == [0, 1, 2, 3]
    assert resumed.steps(ALLOCATED) == [4, 5, 6, 7]


def test_results_of_training_stay_as_they_are():
    weights = []
    for callbacks in ([], [MemoryMonitor(verbose=False)]):
        torch.manual_seed(0)
        model = Blocks()
        make_trainer(*callbacks, max_epochs=2).fit(model)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# Evaluation


EVAL_KEYS = ("allocated_gib", "peak_allocated_gib")


def test_validation_has_its_own_keys_and_counts_its_own_batches():
    recorder = monitored(Blocks(n=20), max_epochs=2)  # 5 batches an epoch, after a sanity check
    for key in EVAL_KEYS:
        assert recorder.steps(f"memory_val/{key}") == list(range(10))
    points = [set(p) for _, p in recorder.points if any(k.startswith("memory_val/") for k in p)]
    assert points == [{f"memory_val/{key}" for key in EVAL_KEYS}] * 10
    assert recorder.steps(ALLOCATED) == list(range(10))


def test_a_sanity_check_writes_nothing():
    class Sane(Exception):  # noqa: N818
        pass

    class Model(Blocks):
        def on_train_start(self) -> None:
            raise Sane("checked")

    recorder, model = Recorder(), Model()
    trainer = make_trainer(MemoryMonitor(), logger=recorder, num_sanity_val_steps=3)
    with pytest.raises(Sane, match="checked"):
        trainer.fit(model)
    assert recorder.points == []


def test_several_loaders_of_validation_count_together():
    class Model(Blocks):
        def val_dataloader(self) -> Any:
            return [self.loader(), self.loader()]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.loss(batch)

    recorder = monitored(Model(n=12))
    assert recorder.steps("memory_val/allocated_gib") == list(range(6))


@pytest.mark.parametrize(("stage", "name"), [("validate", "val"), ("test", "test")])
def test_an_evaluation_alone_has_its_keys(stage, name):
    monitor, recorder = MemoryMonitor(), Recorder()
    trainer = make_trainer(monitor, logger=recorder)
    getattr(trainer, stage)(Blocks(n=20), verbose=False)
    for key in EVAL_KEYS:
        assert recorder.steps(f"memory_{name}/{key}") == list(range(5))
    assert set(monitor.summary()["phases"]) == {"between", name}
    assert recorder.of(ALLOCATED) == []


def test_predict_has_its_keys(tmp_path):
    logger = board(tmp_path)
    make_trainer(MemoryMonitor(), logger=logger).predict(Blocks(n=20))
    found = read_board(tmp_path)
    assert {tag for tag in found if "memory" in tag} == {f"memory_predict/{x}" for x in EVAL_KEYS}
    for key in EVAL_KEYS:
        assert [x for x, _ in found[f"memory_predict/{key}"]] == list(range(5))
        assert {type(value) for _, value in found[f"memory_predict/{key}"]} == {float}


class SpendingInValidation(Blocks):
    """Uses memory in forward of its first step and in the second batch of validation."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            use_temporarily()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 1 and not self.trainer.sanity_checking:
            use_temporarily(2 * TEMPORARY)


@pytest.mark.parametrize("phases", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"accumulate_grad_batches": 4, "val_check_interval": 2}])
def test_training_and_validation_have_each_their_own_peak(phases, kwargs):
    # In the second case validation runs within a window, after its first two batches.
    before = host_memory.resident_bytes() / GIB
    monitor = MemoryMonitor(phases=phases, verbose=False)
    recorder = monitored(SpendingInValidation(n=16), monitor=monitor, limit_val_batches=2, **kwargs)
    one = TEMPORARY / GIB
    validations = len(recorder.of("memory_val/allocated_gib")) // 2
    steps = len(recorder.of(PEAK))
    assert (steps, validations) == ((1, 2) if kwargs else (4, 1))
    step_peaks = [peak - before for peak in recorder.values(PEAK)]
    assert step_peaks == pytest.approx([one] + [0] * (steps - 1), abs=SLACK_GIB)
    val_peaks = [peak - before for peak in recorder.values("memory_val/peak_allocated_gib")]
    assert val_peaks == pytest.approx([0, 2 * one] * validations, abs=SLACK_GIB)
    for _, point in recorder.of(PEAK):
        assert set(point) == (STEP_KEYS | PHASE_KEYS if phases else STEP_KEYS)
    assert monitor.summary()["peak_phase"] == "val"
    assert monitor.summary()["peak_step"] % 2 == 1


def test_an_evaluation_after_a_fit_goes_on_with_its_curves_and_adds_to_the_summary():
    monitor, recorder, model = MemoryMonitor(verbose=False), Recorder(), Blocks(n=20)
    trainer = make_trainer(monitor, logger=recorder)
    trainer.fit(model)
    fitted = monitor.summary()
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    trainer.validate(model, verbose=False)
    assert recorder.steps("memory_val/allocated_gib") == list(range(15))
    assert recorder.steps("memory_test/allocated_gib") == list(range(5))
    summary = monitor.summary()
    phases = summary.pop("phases")
    assert set(phases) == {"between", *PHASES, "val", "test"}
    assert {name: phases[name] for name in fitted["phases"]} == fitted.pop("phases")
    assert summary == fitted


# Phases


class SpendingSGD(torch.optim.SGD):
    spend: Callable[[], None]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.spend()
        return loss


class Spending(Unit):
    """Allocates and frees 256 MiB within one phase of one step of three."""

    def __init__(self, phase: str, step: int) -> None:
        super().__init__(n=3)
        self.phase, self.step = phase, step

    def spend(self, phase: str) -> None:
        if phase == self.phase and self.trainer.global_step == self.step:
            use_temporarily()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.spend("forward")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.spend("backward"))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = SpendingSGD([self.w], lr=0.1)
        optimizer.spend = lambda: self.spend("optimizer")
        return optimizer


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_phase_uses_is_in_its_peak_and_in_no_other(phase, capsys):
    monitor = MemoryMonitor()
    before = host_memory.resident_bytes() / GIB
    recorder = monitored(Spending(phase, 1), monitor=monitor)
    for name in PHASES:
        grown = [peak - before for peak in recorder.values(f"memory_phase/{name}_peak_gib")]
        for step, growth in enumerate(grown):
            expected = TEMPORARY / GIB if (name, step) == (phase, 1) else 0
            assert growth == pytest.approx(expected, abs=SLACK_GIB), (name, step)
    highest = [max(point[key] for key in PHASE_KEYS) for _, point in recorder.of(PEAK)]
    assert recorder.values(PEAK) == highest
    assert max(recorder.values("memory/reserved_gib")) < before + SLACK_GIB
    summary = monitor.summary()
    assert (summary["peak_phase"], summary["peak_step"]) == (phase, 1)
    assert summary["peak_bytes"] == max(recorder.values(PEAK)) * GIB
    printed = " ".join(capsys.readouterr().out.split())
    assert f"in {phase} " in printed


def test_what_is_held_is_in_allocated_and_reserved_of_the_steps_after():
    held: list[Tensor] = []

    class Holding(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 1:
                held.append(torch.empty(TEMPORARY, dtype=torch.uint8).fill_(1))
            return super().training_step(batch, batch_idx)

    recorder = monitored(Holding(n=3))
    held.clear()
    for key in (ALLOCATED, "memory/reserved_gib"):
        first, second, third = recorder.values(key)
        assert second - first == pytest.approx(TEMPORARY / GIB, abs=SLACK_GIB)
        assert third == pytest.approx(second, abs=SLACK_GIB)


def test_two_monitors_measure_the_same():
    class Second(MemoryMonitor):
        pass

    first, second = MemoryMonitor(verbose=False), Second(verbose=False)
    monitored(Spending("forward", 1), second, monitor=first)
    for monitor in (first, second):
        summary = monitor.summary()
        assert (summary["steps"], summary["peak_phase"], summary["peak_step"]) == (3, "forward", 1)
        assert summary["peak_interrupted"] is False
    assert first.summary()["peak_bytes"] == second.summary()["peak_bytes"]


def test_resets_by_other_code_are_watched_while_it_runs_and_no_longer():
    stock, seen = torch.cuda.reset_peak_memory_stats, []

    class Model(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.append(torch.cuda.reset_peak_memory_stats)
            return super().training_step(batch, batch_idx)

    monitored(Model(n=2))
    assert [function.__wrapped__ for function in seen] == [stock] * 2
    assert torch.cuda.reset_peak_memory_stats is stock


# What a user sees


def test_a_table_at_the_end_tells_phases_and_the_gap(capsys):
    make_trainer(MemoryMonitor(anatomy=False), max_epochs=2).fit(Blocks(n=8))
    printed = capsys.readouterr().out
    title = " ".join(printed.split("┏")[0].split())
    assert title.startswith("Memory of cpu: peak ")
    for name in ("between", *PHASES, "val"):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"│ {name}")]
        assert row.count("│") == 5
        assert "iB" in row
    assert "gap" in printed
    assert "interrupted" not in printed


def test_a_run_that_was_interrupted_is_marked_in_the_table(capsys):
    counter = peaks.peak_counter(torch.device("cpu"))

    class Model(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            counter.on_foreign_reset()
            return super().training_step(batch, batch_idx)

    make_trainer(MemoryMonitor()).fit(Model(n=2))
    assert "interrupted" in capsys.readouterr().out


def test_nothing_is_printed_when_that_is_not_wanted(capsys):
    make_trainer(MemoryMonitor(verbose=False)).fit(Unit(n=2))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("every", "text"), [(1, "a point every step"), (3, "every 3 steps")])
def test_one_line_at_the_start_of_a_fit_tells_what_is_read(every, text, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    make_trainer(MemoryMonitor(every_n_steps=every, verbose=False)).fit(Unit(n=2))
    (line,) = [x.getMessage() for x in caplog.records if "MemoryMonitor" in x.getMessage()]
    assert line.startswith("MemoryMonitor: reading cpu of ")
    assert text in line
    assert "\n" not in line
    assert "sampled" not in line


def test_where_the_system_keeps_no_peak_the_line_says_so_and_samples_are_logged(
    caplog, monkeypatch
):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    monkeypatch.setattr(host_memory, "reset_peak_resident", lambda: False)
    recorder = monitored(Unit(n=3))
    assert any("no peak is kept there, it is sampled" in x.getMessage() for x in caplog.records)
    resident = host_memory.resident_bytes() / GIB
    assert recorder.values(PEAK) == pytest.approx([resident] * 3, abs=SLACK_GIB)


# Again, and after a failure


def test_a_second_fit_starts_anew():
    monitor = MemoryMonitor(verbose=False)
    first = monitored(Spending("forward", 1), monitor=monitor)
    assert monitor.summary()["peak_phase"] == "forward"
    high = monitor.summary()["peak_bytes"]
    second = monitored(Unit(n=4), monitor=monitor)
    assert first.steps(ALLOCATED) == [0, 1, 2]
    assert second.steps(ALLOCATED) == [0, 1, 2, 3]
    assert monitor.summary()["steps"] == 4
    assert monitor.summary()["peak_bytes"] < high - TEMPORARY // 2


def test_a_trainer_that_goes_on_goes_on_with_its_x():
    recorder = Recorder()
    trainer = make_trainer(MemoryMonitor(verbose=False), logger=recorder)
    model = Unit(n=3)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    assert recorder.steps(ALLOCATED) == [0, 1, 2, 3, 4, 5]


class FailingAtTwo(Unit):
    """Holds a tensor when it fails in its third batch; `held` watches it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        local = torch.ones(1000)
        if batch_idx == 2:
            self.held = weakref.ref(local)
            raise RuntimeError(OOM_TEXT)
        return super().training_step(batch, batch_idx)


def fail(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(OOM_TEXT)}$"):
        trainer.fit(model)


def test_a_failing_fit_keeps_its_points_and_nothing_that_the_user_lost(tmp_path):
    monitor, model = MemoryMonitor(), FailingAtTwo()
    trainer = make_trainer(monitor, logger=board(tmp_path))
    fail(trainer, model)
    gc.collect()
    assert model.held() is None
    assert [x for x, _ in read_board(tmp_path)[ALLOCATED]] == [0, 1]
    assert monitor.summary()["steps"] == 2
    assert set(monitor.summary()["phases"]) == {"between", *PHASES}
    assert peaks.peak_counter(torch.device("cpu"))._open_spans() == []


def test_a_fit_after_a_failing_one_has_all_its_points():
    monitor = MemoryMonitor(verbose=False)
    fail(make_trainer(monitor), FailingAtTwo())
    recorder = monitored(Unit(n=4), monitor=monitor)
    assert recorder.steps(ALLOCATED) == [0, 1, 2, 3]
    assert monitor.summary()["steps"] == 4


def test_points_before_an_interrupt_are_in_the_board(tmp_path):
    class Interrupted(Unit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return super().training_step(batch, batch_idx)

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="1"):
            make_trainer(MemoryMonitor(), logger=board(tmp_path)).fit(Interrupted())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from the first Ctrl-C on
    assert [x for x, _ in read_board(tmp_path)[ALLOCATED]] == [0, 1, 2]


class Killed(Unit):
    """Sends a signal to its own process."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__(n=at + 5)
        self.number, self.at = number, at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


TERMINATED = 17


def train_and_be_killed(number: int, at: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        make_trainer(MemoryMonitor(), logger=board(folder)).fit(Killed(number, at))
    except SIGTERMException:
        raise SystemExit(TERMINATED) from None


def run_until_killed(number: int, at: int, folder: Path) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch"])
    process = context.Process(target=train_and_be_killed, args=(number, at, folder))
    process.start()
    try:
        process.join(90)
        return process.exitcode
    finally:
        process.kill()


def test_points_before_a_sigterm_are_in_the_board(tmp_path):
    assert run_until_killed(signal.SIGTERM, 5, tmp_path) == TERMINATED
    # Lightning ends the batch at hand.
    assert [x for x, _ in read_board(tmp_path)[ALLOCATED]] == [0, 1, 2, 3, 4, 5]


def test_a_process_that_is_killed_leaves_a_file_that_can_be_read(tmp_path):
    assert run_until_killed(signal.SIGKILL, 250, tmp_path) == -signal.SIGKILL
    steps = [x for x, _ in read_board(tmp_path)[ALLOCATED]]
    assert steps == list(range(len(steps)))
    assert 100 <= len(steps) <= 250


# What it costs


def test_a_step_is_less_than_a_kilobyte_of_events(tmp_path):
    make_trainer(MemoryMonitor(), logger=board(tmp_path)).fit(Unit(n=100))
    (path,) = (tmp_path / "run").glob("events.out.tfevents.*")
    assert [x for x, _ in read_board(tmp_path)[ALLOCATED]] == list(range(100))
    assert path.stat().st_size / 100 < 1000


def size_of(thing: Any, seen: set[int]) -> int:
    """Count what is reachable from a callback through containers and our own objects."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        parts: list[Any] = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    elif type(thing).__module__.startswith("lightning_memopt"):
        parts = list(getattr(thing, "__dict__", {}).values())
    else:
        parts = []
    return 1 + sum(size_of(part, seen) for part in parts)


def test_its_state_does_not_grow_with_the_steps():
    sizes: dict[int, int] = {}

    class Weigh(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if args[-1] in {99, 999}:
                sizes[args[-1]] = size_of(monitor, set())

    class Silent(Recorder):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            pass

    monitor = MemoryMonitor(verbose=False)
    make_trainer(monitor, Weigh(), logger=Silent()).fit(Unit(n=1000))
    assert sizes[99] > 30
    # Equal numbers may be one object or two, and a look may have been taken in between.
    assert sizes[999] < sizes[99] + 20


# Ranks


def fit_rank(rank: int) -> dict[str, Any]:
    held = torch.empty(TEMPORARY * rank, dtype=torch.uint8).fill_(1)
    recorder, monitor = Recorder(), MemoryMonitor(verbose=False)
    make_rank_trainer(monitor, logger=recorder, max_epochs=2).fit(Unit(n=3))
    return {
        "points": [[step, point] for step, point in recorder.points],
        "steps": monitor.summary()["steps"],
        "peak": monitor.summary()["peak_bytes"],
        "held": held.numel(),
    }


def test_ranks_are_compared_at_the_end_of_an_epoch_and_rank_zero_alone_writes(tmp_path):
    ranks = run_two_ranks(fit_rank, tmp_path)
    assert [rank["steps"] for rank in ranks] == [6, 6]
    assert ranks[1]["points"] == []
    points = ranks[0]["points"]
    assert [step for step, point in points if ALLOCATED in point] == list(range(6))
    compared = [(x, p) for x, p in points if "memory_ranks/peak_max_gib" in p]
    assert [step for step, _ in compared] == [2, 5]
    for _, point in compared:
        least, mean, most = (point[f"memory_ranks/peak_{x}_gib"] for x in ("min", "mean", "max"))
        assert mean == pytest.approx((least + most) / 2)
        assert most - least == pytest.approx(TEMPORARY / GIB, abs=4 * SLACK_GIB)
        assert point["memory_ranks/peak_max_rank"] == 1.0
        assert len(point) == 4
        assert {type(value) for value in point.values()} == {float}
    highest = max(point["memory_ranks/peak_max_gib"] for _, point in compared)
    assert highest <= ranks[1]["peak"] / GIB + SLACK_GIB


# Arguments


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"every_n_steps": 0}, ValueError, "^`every_n_steps`.* 0"),
        ({"every_n_steps": -1}, ValueError, "^`every_n_steps`.* -1"),
        ({"every_n_steps": 1.5}, TypeError, "^`every_n_steps`.* 1.5"),
        ({"every_n_steps": True}, TypeError, "^`every_n_steps`.* True"),
        ({"every_n_steps": "2"}, TypeError, "^`every_n_steps`.* '2'"),
        ({"phases": 1}, TypeError, "^`phases`.* 1"),
        ({"phases": "no"}, TypeError, "^`phases`.* 'no'"),
        ({"verbose": None}, TypeError, "^`verbose`.* None"),
        ({"anatomy": "yes"}, TypeError, "^`anatomy`.* 'yes'"),
        ({"advice": 1}, TypeError, "^`advice`.* 1"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(kwargs, error, text):
    with pytest.raises(error, match=rf"{text}[^\n]*$"):
        MemoryMonitor(**kwargs)


def test_arguments_are_kept_under_their_names():
    assert vars(MemoryMonitor(3, False, False, False, True)) == {
        "every_n_steps": 3,
        "phases": False,
        "verbose": False,
        "anatomy": False,
        "advice": True,
    }
