"""Fails on a version of Lightning that moved one of the private names we read."""

from __future__ import annotations

import copy
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memopt.callbacks import _lightning
from lightning_memopt.callbacks._lightning import (
    PointWriter,
    copy_loader,
    estimate_steps,
    is_window_end,
    logged_step,
    set_train_loaders,
    train_loaders,
)
from tests.models import Recorder, Unit, make_trainer


class Stream(IterableDataset):
    """A data set without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(torch.ones(self.n, 1).split(1))


class Logging(Unit):
    """Logs the batch at hand; `stepped` has the batches after which the optimizer stepped."""

    def __init__(self, n: int = 10) -> None:
        super().__init__(n)
        self.stepped: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("batch", float(batch_idx))
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped.append(self.batch_idx)


class LoggingStream(Logging):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(self.n), batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch], batch_idx)


class LoggingByHand(Logging):
    """Steps two optimizers a batch by hand."""

    def __init__(self, n: int = 10) -> None:
        super().__init__(n)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.w], lr=0.1), torch.optim.SGD([self.w], lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class Reader(pl.Callback):
    """Reads the x and the window's end at each batch."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.ends: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.step = logged_step(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        assert logged_step(trainer) == self.step
        batch_idx = args[-1]
        self.steps.append((batch_idx, self.step))
        if is_window_end(trainer):
            self.ends.append(batch_idx)


# The x of `self.log`


@pytest.mark.parametrize(
    ("model", "factor"),
    [(Logging, 1), (Logging, 4), (LoggingStream, 1), (LoggingStream, 4), (LoggingByHand, 1)],
)
def test_the_step_is_the_x_of_self_log(model, factor):
    recorder, reader = Recorder(), Reader()
    make_trainer(
        reader, logger=recorder, log_every_n_steps=1, accumulate_grad_batches=factor, max_epochs=2
    ).fit(model())
    logged = [(int(p["batch"]), x) for x, p in recorder.points if "batch" in p]
    assert len(logged) >= 6
    # Lightning logs where the optimizer stepped.
    assert [point for point in reader.steps if point in logged] == logged


def test_the_end_of_an_epoch_is_logged_at_the_x_of_its_last_step():
    class Model(Unit):
        def on_train_epoch_end(self) -> None:
            self.log("end", 1.0)

    class Read(pl.Callback):
        found: list[int] = []

        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.found.append(logged_step(trainer) - 1)

    recorder, read = Recorder(), Read()
    make_trainer(read, logger=recorder, max_epochs=2).fit(Model(n=3))
    assert read.found == [x for x, point in recorder.points if "end" in point] == [2, 5]


@pytest.mark.parametrize("model", [Logging, LoggingStream])
@pytest.mark.parametrize(("n", "factor"), [(10, 1), (10, 4), (8, 4), (3, 8), (7, 2)])
def test_a_window_ends_where_the_optimizer_steps(model, n, factor):
    reader, module = Reader(), model(n)
    make_trainer(reader, accumulate_grad_batches=factor, max_epochs=2).fit(module)
    assert len(module.stepped) == 2 * -(-n // factor)
    assert reader.ends == module.stepped


def test_by_hand_every_batch_is_a_window():
    reader = Reader()
    trainer = make_trainer(reader)
    trainer.fit(LoggingByHand(n=4))
    assert trainer.global_step == 8
    assert reader.ends == [0, 1, 2, 3]
    assert reader.steps == [(0, 0), (1, 1), (2, 2), (3, 3)]


# Points to loggers


def trainer_with(*loggers: Any, is_global_zero: bool = True) -> Any:
    return SimpleNamespace(loggers=list(loggers), is_global_zero=is_global_zero)


def board(folder: Path, **kwargs: Any) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name=None, version="run", **kwargs)


def read_board(logger: TensorBoardLogger) -> dict[str, list[tuple[int, float]]]:
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_points_are_in_the_board_after_a_flush(tmp_path):
    logger = board(tmp_path)
    writer = PointWriter(trainer_with(logger))
    for step in range(3):
        writer.add({"a": step / 4, "b": 1.0}, step)
    writer.add({"c": 5.0}, 7)
    writer.flush()
    writer.flush()
    assert read_board(logger) == {
        "a": [(0, 0.0), (1, 0.25), (2, 0.5)],
        "b": [(0, 1.0), (1, 1.0), (2, 1.0)],
        "c": [(7, 5.0)],
    }


def test_a_boards_prefix_is_before_its_keys_as_lightning_puts_it(tmp_path):
    logger = board(tmp_path, prefix="p")
    logger.log_metrics({"stock": 1.0}, step=0)
    writer = PointWriter(trainer_with(logger))
    writer.add({"memory/ours": 2.0}, 0)
    writer.flush()
    assert read_board(logger) == {"p-stock": [(0, 1.0)], "p-memory/ours": [(0, 2.0)]}


def test_two_boards_and_another_logger_have_the_same_points(tmp_path):
    boards = [board(tmp_path / "1"), board(tmp_path / "2", prefix="p")]
    recorder = Recorder()
    writer = PointWriter(trainer_with(boards[0], recorder, boards[1]))
    for step in range(2):
        writer.add({"a": 0.5}, step)
    writer.flush()
    points = [(0, 0.5), (1, 0.5)]
    assert [read_board(logger) for logger in boards] == [{"a": points}, {"p-a": points}]
    assert recorder.points == [(0, {"a": 0.5}), (1, {"a": 0.5})]


def test_a_board_that_was_closed_meanwhile_is_written_on(tmp_path):
    logger = board(tmp_path)
    writer = PointWriter(trainer_with(logger))
    writer.add({"a": 0.5}, 0)
    writer.flush()
    logger.experiment.close()
    writer.add({"a": 1.5}, 1)
    writer.flush()
    # Two files by then, which TensorBoard reads in the order of their names.
    assert sorted(read_board(logger)["a"]) == [(0, 0.5), (1, 1.5)]


def test_points_of_two_writers_and_of_lightning_share_a_board(tmp_path):
    logger = board(tmp_path)
    first, second = (PointWriter(trainer_with(logger)) for _ in range(2))
    for step in range(30):
        first.add({"a": float(step)}, step)
        second.add({"b": float(step)}, step)
        logger.log_metrics({"c": float(step)}, step)
        if step % 7 == 0:
            first.flush()
        if step % 5 == 0:
            second.flush()
    first.flush()
    second.flush()
    points = [(step, float(step)) for step in range(30)]
    assert read_board(logger) == {"a": points, "b": points, "c": points}


def test_another_logger_gets_its_own_copy_of_each_point_at_once():
    class Greedy(Recorder):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            metrics.clear()

    greedy, recorder = Greedy(), Recorder()
    writer = PointWriter(trainer_with(greedy, recorder))
    writer.add({"a": 0.5}, 3)
    assert greedy.points == recorder.points == [(3, {"a": 0.5})]


def test_no_more_than_a_hundred_points_are_held_back(tmp_path):
    logger = board(tmp_path)
    writer = PointWriter(trainer_with(logger))
    held = []
    for step in range(1001):
        writer.add({"a": 0.5}, step)
        held.append(len(writer._points))
    assert max(held) < 100
    assert held[-1] == 1
    assert len(read_board(logger)["a"]) == 1000


def test_no_point_is_held_back_for_long(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=50.0)
    monkeypatch.setattr(_lightning, "time", clock)
    logger = board(tmp_path)
    writer = PointWriter(trainer_with(logger))
    for step in range(4):
        writer.add({"a": 0.5}, step)
        clock.now += 2
    assert len(writer._points) == 0
    writer.add({"a": 0.5}, 4)
    assert len(writer._points) == 1
    assert len(read_board(logger)["a"]) == 4


def test_only_rank_zero_writes(tmp_path):
    recorder = Recorder()
    writer = PointWriter(trainer_with(recorder, board(tmp_path), is_global_zero=False))
    writer.add({"a": 0.5}, 0)
    writer.add_layout({"category": {"chart": ["a"]}})
    writer.flush()
    assert recorder.points == []
    assert list(tmp_path.iterdir()) == []


def test_a_board_with_its_own_log_metrics_gets_every_point_through_it(tmp_path):
    class Mine(TensorBoardLogger):
        seen: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.seen.append((step, dict(metrics)))

    wrapped = board(tmp_path / "2")
    seen: list[Any] = []
    wrapped.log_metrics = lambda metrics, step=None: seen.append((step, dict(metrics)))
    mine = Mine(tmp_path / "1")
    PointWriter(trainer_with(mine, wrapped)).add({"a": 0.5}, 3)
    assert mine.seen == seen == [(3, {"a": 0.5})]


def test_charts_have_the_prefix_of_their_board_and_of_other_loggers_nothing_is_asked(tmp_path):
    from tensorboard.plugins.custom_scalar import layout_pb2

    logger = board(tmp_path, prefix="p")
    writer = PointWriter(trainer_with(logger, Recorder(), CSVLogger(tmp_path / "csv")))
    writer.add_layout({"category": {"chart": ["a", "b"]}})
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["category"]
    assert list(layout.category[0].chart[0].multiline.tag) == ["p-a", "p-b"]


# Schedules that end with training


class Asking(Unit):
    """Keeps what the Trainer estimates when schedules are built."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Estimating(pl.Callback):
    """Estimates seven steps, from `setup` to the start of the fit."""

    def setup(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.asked: list[tuple[int, int]] = []
        self.put_back = estimate_steps(trainer, self.steps)
        assert isinstance(trainer, pl.Trainer)
        assert type(trainer).__name__ == "Trainer"

    def steps(self, batches: int, epochs: int) -> int:
        self.asked.append((batches, epochs))
        return 7

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.put_back()


@pytest.mark.parametrize(
    ("kwargs", "ours", "stock"),
    [
        ({"max_epochs": 3}, 7, 15),
        ({"max_epochs": 3, "max_steps": 4}, 4, 4),
        ({"max_epochs": 3, "max_steps": 9}, 7, 9),
        ({"max_epochs": -1, "max_steps": 9}, 9, 9),  # no number of epochs to ask with
    ],
)
def test_the_estimate_is_ours_within_the_trainers_steps_until_it_is_put_back(kwargs, ours, stock):
    model, callback = Asking(n=5), Estimating()
    trainer = make_trainer(callback, **kwargs)
    trainer.fit(model)
    assert model.estimate == ours
    assert callback.asked == ([(5, 3)] if kwargs["max_epochs"] == 3 else [])
    assert type(trainer) is pl.Trainer
    assert trainer.estimated_stepping_batches == stock


def test_a_loader_without_a_length_leaves_the_estimate_to_the_trainer():
    class AskingStream(Asking):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Stream(self.n), batch_size=1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch], batch_idx)

    model, stock, callback = AskingStream(n=5), AskingStream(n=5), Estimating()
    make_trainer(callback, max_epochs=3).fit(model)
    make_trainer(max_epochs=3).fit(stock)
    assert model.estimate == stock.estimate
    assert callback.asked == []


# The loaders of training


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_loaders_are_exchanged_with_their_workers_and_the_loops_iterator():
    class Exchange(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            old = train_loaders(trainer)
            assert isinstance(old, CombinedLoader)
            assert old.flattened == [trainer.train_dataloader]
            self.before = set(active_children())
            new = copy.copy(old)
            new.flattened = [
                copy_loader(old.flattened[0], dataset=TensorDataset(torch.zeros(3, 1)))
            ]
            set_train_loaders(trainer, new, fetch=False)
            assert train_loaders(trainer) is new
            assert set(active_children()) == self.before  # the loop still fetches from the old
            set_train_loaders(trainer, new)
            self.after = set(active_children())

    class Zeros(Unit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch[0].item() == 0
            return super().training_step(batch, batch_idx)

    loader = DataLoader(TensorDataset(torch.ones(3, 1)), num_workers=1, persistent_workers=True)
    trainer = make_trainer(exchange := Exchange())
    assert train_loaders(trainer) is None
    trainer.fit(model := Zeros(), loader)
    assert len(model.grads) == 3
    assert len(exchange.before) == len(exchange.after) == 1
    assert not exchange.before & exchange.after
    assert active_children() == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_copied_loader_has_workers_of_its_own():
    class Mine(DataLoader[Any]):
        def __init__(self, *, size: int, name: str) -> None:
            super().__init__(range(size), 2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
            self.name = name

    loader = Mine(size=4, name="a")
    running = iter(loader)
    copied = copy_loader(loader, batch_sampler=[[3], [1]], persistent_workers=False)
    assert [batch.tolist() for batch in copied] == [[3], [1]]
    assert (type(copied), copied.name) == (Mine, "a")
    assert [batch.tolist() for batch in running] == [[0, 1], [2, 3]]
    assert loader.batch_sampler is not copied.batch_sampler
    with pytest.raises(ValueError, match="should not be set after"):  # so a copy is needed
        loader.batch_sampler = [[0]]
    assert running is iter(loader) is loader._iterator
    assert copied._iterator is None


# The names themselves


def test_lightning_still_has_the_private_names_that_are_read(tmp_path):
    trainer, logger = make_trainer(), board(tmp_path, prefix="p")
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0
    assert callable(trainer.fit_loop._should_accumulate)
    assert trainer.fit_loop._combined_loader is None
    assert trainer.fit_loop._data_fetcher is None
    assert logger._prefix == "p"
    assert board(tmp_path)._prefix == ""
    assert logger.LOGGER_JOIN_CHAR == "-"
    file_writer = logger.experiment._get_file_writer()
    assert file_writer is logger.experiment._get_file_writer()
    assert isinstance(pl.Trainer.estimated_stepping_batches, property)
