from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from lightning_memopt.callbacks._train_loaders import (
    MicroBatches,
    samples_per_batch,
    steps_per_epoch,
)
from tests.models import Unit, make_trainer
from tests.ranks import run_two_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
    pytest.mark.filterwarnings("ignore:Total length of"),
]


class Steps(Unit):
    """Keeps the samples of every optimizer step, in pieces as they came."""

    def __init__(self, loader: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.loader = loader
        self.window: list[list[int]] = []
        self.steps: list[list[list[int]]] = []
        self.validated: list[int] = []

    def train_dataloader(self) -> Any:
        assert self.loader is not None
        return self.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(range(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["a"] if isinstance(batch, dict) else batch
        self.window.append(batch.tolist())
        return self.w.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.window == []  # an optimizer step is complete
        self.validated.append(len(self.steps))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps.append(self.window)
        self.window = []


class Cut(pl.Callback):
    """Replaces the loader; `parts` are those of each epoch, the last for all that follow."""

    def __init__(self, samples: int, *parts: int) -> None:
        self.samples, self.parts = samples, parts

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.per_batch = samples_per_batch(trainer)
        self.expected = steps_per_epoch(trainer, self.samples)
        self.workers = set(multiprocessing.active_children())
        self.micro = MicroBatches(trainer, self.samples)
        self.use(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.use(trainer)

    def use(self, trainer: pl.Trainer) -> None:
        parts = self.parts[min(trainer.current_epoch, len(self.parts) - 1)]
        self.micro.use(parts)
        trainer.accumulate_grad_batches = parts

    def on_train_batch_start(self, *_: Any) -> None:
        assert not self.workers & set(multiprocessing.active_children())

    def teardown(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.micro.put_back()
        trainer.accumulate_grad_batches = 1


def fit(
    loader: Callable[[], Any], *callbacks: pl.Callback, max_epochs: int = 2, **kwargs: Any
) -> Steps:
    torch.manual_seed(0)
    model = Steps(loader)
    make_trainer(*callbacks, max_epochs=max_epochs, **({"num_sanity_val_steps": 0} | kwargs)).fit(
        model
    )
    assert model.window == []
    return model


def flat(lists: Any) -> list[int]:
    return list(chain.from_iterable(lists))


def samples_of(model: Steps) -> list[list[int]]:
    return [flat(step) for step in model.steps]


def load(n: int, batch_size: int, **kwargs: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(range(n), batch_size, **kwargs)  # type: ignore[arg-type]


# The steps are those of the large loader


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [8, 13, 15])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_steps_have_the_samples_of_a_loader_with_large_batches(n, parts, drop_last):
    kwargs = {"shuffle": True, "drop_last": drop_last}
    large, ours = fit(load(n, 4, **kwargs)), fit(load(n, 3, **kwargs), cut := Cut(4, parts))
    assert samples_of(ours) == samples_of(large)
    assert cut.expected == len(ours.steps) / 2 == (n // 4 if drop_last else -(-n // 4))
    assert cut.per_batch == 3
    whole = [step for step in ours.steps if len(flat(step)) == 4]
    assert all(len(step) == parts for step in whole)
    assert all(len(piece) <= -(-4 // parts) for step in ours.steps for piece in step)


def from_generator(batch_size: int) -> Callable[[], DataLoader[Any]]:
    return lambda: load(14, batch_size, shuffle=True, generator=torch.Generator().manual_seed(3))()


def distributed(batch_size: int, **kwargs: Any) -> Callable[[], DataLoader[Any]]:
    def make() -> DataLoader[Any]:
        sampler = DistributedSampler(range(21), 2, 1)  # type: ignore[arg-type, var-annotated]
        return load(21, batch_size, sampler=sampler, **kwargs)()

    return make


def by_batch_sampler(batch_size: int) -> Callable[[], DataLoader[Any]]:
    def make() -> DataLoader[Any]:
        batches = BatchSampler(range(9, 0, -1), batch_size, drop_last=True)
        return DataLoader(range(10), batch_sampler=batches)  # type: ignore[arg-type]

    return make


def in_a_dict(batch_size: int) -> Callable[[], Any]:
    return lambda: {"a": load(13, batch_size, shuffle=True)()}


@pytest.mark.parametrize(
    "loader",
    [from_generator, distributed, by_batch_sampler, in_a_dict],
    ids=lambda loader: loader.__name__,
)
def test_the_order_is_that_of_the_large_loader(loader):
    large, ours = fit(loader(4), max_epochs=3), fit(loader(2), Cut(4, 2), max_epochs=3)
    assert samples_of(ours) == samples_of(large)
    assert [len(step) for step in ours.steps[:2]] == [2, 2]


def test_workers_of_a_distributed_sampler_keep_its_order():
    kwargs = {"num_workers": 1}
    large, ours = fit(distributed(4, **kwargs)), fit(distributed(2, **kwargs), Cut(4, 2))
    assert samples_of(ours) == samples_of(large)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_take_the_same_new_order_whatever_the_parts(persistent_workers):
    loader = load(13, 3, shuffle=True, num_workers=2, persistent_workers=persistent_workers)
    before = set(multiprocessing.active_children())
    cuts = Cut(4, 1), Cut(4, 3), Cut(4, 3)
    fits = [fit(loader, cut) for cut in cuts]
    assert samples_of(fits[0]) == samples_of(fits[1]) == samples_of(fits[2])
    epochs = [flat(samples_of(fits[0])[i : i + 4]) for i in (0, 4)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(13))
    assert epochs[0] != epochs[1]
    assert all(len(cut.workers - before) == 2 for cut in cuts)
    assert set(multiprocessing.active_children()) == before


def test_more_parts_in_a_later_epoch_and_loaders_made_anew():
    class Read(pl.Callback):
        loaders: list[Any] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.train_dataloader not in self.loaders:
                self.loaders.append(trainer.train_dataloader)

    kwargs = {"max_epochs": 6, "reload_dataloaders_every_n_epochs": 3}
    loader, large = load(13, 3, shuffle=True), fit(load(13, 4, shuffle=True), **kwargs)
    ours = fit(loader, Cut(4, 1, 2, 2, 2, 4, 4), read := Read(), **kwargs)
    assert samples_of(ours) == samples_of(large)
    assert [len(step) for step in ours.steps[::4]] == [1, 2, 2, 2, 4, 4]
    assert [loader.batch_size for loader in read.loaders] == [4, 2, 2, 1]  # no more than it takes


def test_what_else_the_loader_is_stays():
    class Mine(DataLoader[Any]):
        pass

    def collate(samples: list[int]) -> Tensor:
        return -torch.tensor(samples)

    def start(worker: int) -> None:
        pass

    class Read(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.loader = trainer.train_dataloader

    made = Mine(range(9), 3, collate_fn=collate, worker_init_fn=start, drop_last=True)  # type: ignore[arg-type]
    read = Read()
    ours = fit(lambda: made, Cut(4, 2), read)
    assert samples_of(ours)[:2] == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert type(read.loader) is Mine
    assert read.loader is not made
    for name in ("dataset", "sampler", "collate_fn", "worker_init_fn", "drop_last", "generator"):
        assert getattr(read.loader, name) is getattr(made, name)
    assert read.loader.batch_size == read.loader.batch_sampler.batch_size == 2
    assert made.batch_size == made.batch_sampler.batch_size == 3


# Limits and validation


@pytest.mark.parametrize(
    ("kwargs", "steps"),
    [
        ({"limit_train_batches": 4}, 2),
        ({"limit_train_batches": 5}, 3),  # 10 samples, up to the next whole step
        ({"limit_train_batches": 100}, 8),
        ({"limit_train_batches": 0.5}, 4),
        ({"overfit_batches": 1}, 1),
        ({"fast_dev_run": True}, 1),
        ({"limit_train_batches": 14, "drop_last": True}, 7),
    ],
)
def test_a_limit_holds_for_samples_up_to_a_whole_step(kwargs, steps):
    kwargs = dict(kwargs)
    loader = load(30 if "drop_last" in kwargs else 32, 2, drop_last=kwargs.pop("drop_last", False))
    ours = fit(loader, cut := Cut(4, 2), max_epochs=1, **kwargs)
    assert samples_of(ours) == [list(range(4 * i, 4 * i + 4)) for i in range(steps)]
    assert cut.expected == steps


@pytest.mark.parametrize(
    ("n", "kwargs", "validated"),
    [
        (32, {}, [8, 16]),
        (30, {}, [8, 16]),  # the last step is short
        (32, {"val_check_interval": 0.25}, [2, 4, 6, 8, 10, 12, 14, 16]),
        (32, {"val_check_interval": 6}, [3, 6, 11, 14]),
        (32, {"val_check_interval": 7}, [4, 8, 12, 16]),
        (32, {"val_check_interval": 1}, list(range(1, 17))),
        (32, {"val_check_interval": 24, "check_val_every_n_epoch": None}, [12]),
        (30, {"val_check_interval": 0.5}, [3, 6, 11, 14]),
        (32, {"limit_train_batches": 8, "val_check_interval": 0.5}, [2, 4, 6, 8]),
        (32, {"check_val_every_n_epoch": 2}, [16]),
        (3, {}, [1, 2]),
    ],
)
def test_validation_stays_in_its_place(n, kwargs, validated):
    kwargs = {"num_sanity_val_steps": 2} | kwargs
    ours = fit(load(n, 2), Cut(4, 2), **kwargs)
    assert ours.validated[-len(validated) :] == validated
    assert ours.validated[: -len(validated)] == [0]  # the sanity check


def test_no_validation_is_lost_where_the_last_step_has_fewer_pieces():
    stock, ours = (
        fit(load(33, 2), *callbacks, val_check_interval=0.25, max_epochs=1)
        for callbacks in ([], [Cut(4, 4)])
    )
    assert len(ours.validated) == len(stock.validated) == 4


def test_validation_comes_once_where_an_epoch_is_less_than_a_step():
    ours = fit(load(6, 2), Cut(8, 4), val_check_interval=1)
    assert ours.validated == [1, 2]
    assert [len(step) for step in ours.steps] == [3, 3]


def test_validation_by_time_stays():
    class Read(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.read = trainer.val_check_batch

    if not hasattr(make_trainer(), "_val_check_time_interval"):
        pytest.skip("this Lightning validates by batches only")
    read = Read()
    ours = fit(load(8, 2), Cut(4, 2), read, val_check_interval="00:01:00:00")
    assert read.read is None
    assert len(ours.steps) == 4


# Where loaders come from, and what is left behind


def as_module(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"model": Steps(lambda: loader)}


def as_argument(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"model": Steps(), "train_dataloaders": loader}


def as_combined(loader: DataLoader[Any]) -> dict[str, Any]:
    return {"model": Steps(), "train_dataloaders": CombinedLoader({"a": loader}, "min_size")}


def as_datamodule(loader: DataLoader[Any]) -> dict[str, Any]:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

        def val_dataloader(self) -> Any:
            return DataLoader(range(1))  # type: ignore[arg-type]

    return {"model": Steps(), "datamodule": Data()}


@pytest.mark.parametrize(
    "source",
    [as_module, as_argument, as_combined, as_datamodule],
    ids=lambda source: source.__name__,
)
def test_a_second_fit_finds_the_loader_of_the_user(source):
    loader = load(14, 3, num_workers=1, persistent_workers=True)()
    for _ in range(2):
        arguments, cut = source(loader), Cut(4, 2)
        trainer = make_trainer(cut, max_epochs=2)
        for _ in range(2):
            trainer.fit(**arguments)
            trainer.fit_loop.epoch_progress.reset()
            assert CombinedLoader(trainer.train_dataloader).flattened == [loader]
            assert trainer.num_training_batches == 5
            assert trainer.val_check_batch == 5
        steps = samples_of(arguments["model"])
        assert steps == [[*range(i, min(i + 4, 14))] for i in (0, 4, 8, 12)] * 4
    assert type(loader.batch_sampler) is BatchSampler
    assert loader.batch_size == 3
    assert multiprocessing.active_children() == []


def test_the_loader_of_the_user_is_put_back_after_an_error():
    class Failing(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("mine")

    class CutAndRestore(Cut):
        def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
            self.teardown(trainer)

    loader = load(14, 3, num_workers=1)()
    trainer = make_trainer(CutAndRestore(4, 2))
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(Failing(lambda: loader))
    assert trainer.train_dataloader is loader
    assert multiprocessing.active_children() == []


def test_schedules_can_know_the_steps_before_and_after():
    class Ask(Cut):
        def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            assert samples_per_batch(trainer) is None  # the loop has no loader yet
            assert steps_per_epoch(trainer, self.samples) is None
            trainer.fit_loop.setup_data()
            self.before = steps_per_epoch(trainer, self.samples)

        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            super().on_train_epoch_start(trainer)
            self.after = trainer.estimated_stepping_batches

    ask = Ask(8, 3)
    ours = fit(load(30, 4), ask)
    assert len(ours.steps) == ask.after == 2 * ask.before == 8


# What is refused


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Own(BatchSampler):
    pass


class Unsized(SequentialSampler):
    __len__ = None  # type: ignore[assignment]


class Fixed(DataLoader[Any]):
    def __len__(self) -> int:
        return 2


class Resumable(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


REFUSED: dict[str, tuple[Callable[[], Any], str, int | None]] = {
    "two": (lambda: [load(8, 2)(), load(8, 2)()], "got 2 loaders", None),
    "no loader of PyTorch's": (lambda: torch.arange(8.0).split(2)[0], "got a `Tensor`", None),
    "stream": (lambda: DataLoader(Stream(), 2), "got a `Stream`, .* `IterableDataset`", 2),
    "one by one": (load(8, batch_size=None), "got one with `batch_size=None`", None),
    "batches of one's own": (
        lambda: DataLoader(range(8), batch_sampler=Own(range(8), 2, False)),
        "got a batch sampler of your own, `Own`",
        None,
    ),
    "unsized": (
        lambda: DataLoader(range(8), 2, sampler=Unsized(range(8))),
        "got a sampler without a length, `Unsized`",
        2,
    ),
    "fixed": (lambda: Fixed(range(8), 2), "got a `Fixed` with a length of its own", 2),
    "resumable": (lambda: Resumable(range(8), 2), "got a `Resumable`, which resumes", 2),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_what_cannot_be_replaced_is_refused_with_a_way_out(name):
    loader, reason, batch_size = REFUSED[name]
    cut = Cut(4, 2)
    with pytest.raises(
        MisconfigurationException, match=rf'^`split="loader"` needs .*{reason}.* `split="step"`'
    ) as error:
        fit(loader, cut)
    assert "\n" not in str(error.value)
    assert cut.expected is None
    assert cut.per_batch == batch_size


def test_an_epoch_without_a_step_is_refused():
    with pytest.raises(MisconfigurationException, match=r"fewer than the 9 samples .*`drop_last="):
        fit(load(8, 2, drop_last=True), Cut(9, 3))


# Ranks


def fit_both(rank: int) -> list[list[list[int]]]:
    found = []
    for batch_size, callbacks in ((4, []), (3, [Cut(4, 2)])):
        torch.manual_seed(rank)
        model = Steps(load(21, batch_size, shuffle=True))
        make_trainer(
            *callbacks,
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_epochs=2,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        ).fit(model)
        found.append(samples_of(model))
    return found


def test_ranks_share_the_samples_as_lightning_does(tmp_path: Path):
    (large, ours), (other_large, other) = run_two_ranks(fit_both, tmp_path)
    assert (ours, other) == (large, other_large)
    assert [len(step) for step in ours] == [4, 4, 3] * 2
    assert set(flat(ours[:3] + other[:3])) == set(range(21))
