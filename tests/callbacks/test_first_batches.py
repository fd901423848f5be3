from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_memopt.callbacks._first_batches import first_batches
from tests.models import Unit, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`"),
]


class Drawing(Dataset[Tensor]):
    """A sample is its index, and a number drawn from each of the generators there are."""

    def __init__(self, n: int = 10) -> None:
        self.n = n
        self.augment = [random.Random(1), numpy.random.default_rng(1)]
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        drawn += [each.random() for each in self.augment]
        drawn += [float(torch.rand((), generator=self.generator))]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class OfItsOwn(Sampler[int]):
    """Shuffles in place what it holds, counts, and reaches the data from another side."""

    def __init__(self, data: Dataset[Tensor]) -> None:
        self.data = data
        self.order = list(range(len(data)))  # type: ignore[arg-type]
        self.generator = random.Random(3)
        self.passes = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.generator.shuffle(self.order)
        for index in self.order:
            self.taken = index
            yield (index + self.passes) % len(self.order)


class Stored:
    """No loader of PyTorch's, but batches one can ask for by number."""

    def __init__(self) -> None:
        self.batches = torch.arange(10.0).split(2)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


class Seen(Unit):
    """Keeps every batch it is given, as plain numbers."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.loader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(plain(batch))
        return self.w.sum()


class Look(pl.Callback):
    """Looks at the first batches, and at the processes before and after."""

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        before = set(multiprocessing.active_children())
        self.found = [plain(batch) for batch in first_batches(trainer, self.count)]
        assert set(multiprocessing.active_children()) == before
        self.workers = len(before)


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch.tolist() if isinstance(batch, Tensor) else batch


def fit(loader: Callable[[], Any], *callbacks: pl.Callback, **kwargs: Any) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = Seen(loader)
    make_trainer(*callbacks, max_epochs=2, **kwargs).fit(model)
    return [*model.seen, float(torch.rand(())), random.random(), float(numpy.random.rand())]


def load(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Drawing(), batch_size=2, **kwargs)


def with_sampler(sampler: Callable[[Dataset[Tensor]], Any], **kwargs: Any) -> DataLoader[Any]:
    data = Drawing()
    return DataLoader(data, sampler=sampler(data), batch_size=2, **kwargs)


def combine(mode: str, **kwargs: Any) -> CombinedLoader:
    loaders = {
        "a": DataLoader(Drawing(7), batch_size=2, shuffle=True, **kwargs),
        "b": DataLoader(Drawing(3), batch_size=2),
    }
    return CombinedLoader(loaders, mode)  # type: ignore[arg-type]


EXACT: dict[str, Callable[[], Any]] = {
    "in order": load,
    "shuffled": lambda: load(shuffle=True),
    "generator": lambda: load(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drop_last": lambda: load(drop_last=True, shuffle=True),
    "one by one": lambda: DataLoader(Drawing(), batch_size=None, shuffle=True),
    "no data set of PyTorch's": lambda: DataLoader(list(torch.arange(9.0)), 2, shuffle=True),
    "subset": lambda: with_sampler(lambda data: SubsetRandomSampler([5, 3, 1, 0, 2, 8, 9])),
    "weighted": lambda: with_sampler(lambda data: WeightedRandomSampler([0.1] * 9 + [1.0], 8)),
    "distributed": lambda: with_sampler(lambda data: DistributedSampler(data, 2, 1)),
    "a sampler of one's own": lambda: with_sampler(OfItsOwn),
    "a batch sampler of one's own": lambda: DataLoader(
        Drawing(), batch_sampler=[[1, 2, 3], [4], [5, 6]]
    ),
    "stored": Stored,
}
SAME_KIND: dict[str, Callable[[], Any]] = {
    "workers": lambda: load(shuffle=True, num_workers=2),
    "persistent": lambda: load(
        num_workers=2,
        shuffle=True,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(5),
    ),
    "workers and a sampler": lambda: with_sampler(OfItsOwn, num_workers=1),
    "min_size": lambda: combine("min_size"),
    "max_size": lambda: combine("max_size"),
    "max_size_cycle": lambda: combine("max_size_cycle", num_workers=1),
}
LOADERS = EXACT | SAME_KIND


def workers_of(loader: Any) -> int:
    combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader)
    return sum(getattr(each, "num_workers", 0) for each in combined.flattened)


@pytest.mark.parametrize("name", LOADERS)
def test_training_goes_on_as_if_nobody_had_looked(name):
    look = Look()
    assert fit(LOADERS[name], look) == fit(LOADERS[name])
    assert len(look.found) == (2 if name == "min_size" else 3)
    assert look.workers == workers_of(LOADERS[name]())


@pytest.mark.parametrize("name", EXACT)
def test_without_workers_the_batches_are_those_that_the_loop_gets(name):
    look = Look()
    assert fit(EXACT[name], look)[:3] == look.found


@pytest.mark.parametrize("name", SAME_KIND)
def test_other_batches_are_of_the_same_kind(name):
    look = Look()
    seen = fit(SAME_KIND[name], look)
    assert [shape(batch) for batch in look.found] == [
        shape(batch) for batch in seen[: len(look.found)]
    ]


def shape(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: shape(value) for key, value in batch.items()}
    return None if batch is None else torch.tensor(batch).shape


@pytest.mark.parametrize(
    ("kwargs", "count"),
    [
        ({"limit_train_batches": 2}, 2),
        ({"limit_train_batches": 0.2}, 1),
        ({"overfit_batches": 1}, 1),
    ],
)
def test_no_more_batches_are_read_than_an_epoch_has(kwargs, count):
    look = Look()
    seen = fit(LOADERS["shuffled"], look, **kwargs)
    assert seen == fit(LOADERS["shuffled"], **kwargs)
    assert look.found == seen[:count]
    assert len(seen) == 2 * count + 3


def test_only_what_is_looked_at_is_loaded():
    class Counting(Drawing):
        loaded: list[int] = []

        def __getitem__(self, index: int) -> Tensor:
            self.loaded.append(index)
            return super().__getitem__(index)

    class Count(Look):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            super().on_train_start(trainer)
            self.loaded = list(Counting.loaded)

    look = Count(count=2)
    fit(lambda: DataLoader(Counting(), batch_size=3), look)
    assert look.loaded == [0, 1, 2, 3, 4, 5]


def test_a_sampler_without_an_end_is_read_no_further():
    class Forever(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield int(torch.randint(10, ()))

    def loader() -> DataLoader[Any]:
        return DataLoader(Drawing(), sampler=Forever(), batch_size=2)

    look = Look()
    seen = fit(loader, look, limit_train_batches=4)
    assert seen == fit(loader, limit_train_batches=4)
    assert len(look.found) == 3


@pytest.mark.parametrize("is_nested", [False, True])
def test_data_that_a_sampler_knows_is_not_copied(is_nested):
    class Large(Drawing):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("a copy of all data")

    class OfTheList(list[Tensor]):
        __deepcopy__ = Large.__deepcopy__

    def loader() -> DataLoader[Any]:
        if not is_nested:
            data: Any = OfTheList(torch.arange(9.0))
            return DataLoader(data, sampler=OfItsOwn(data), batch_size=2)
        large = Large()
        return DataLoader(Subset(large, range(10)), sampler=OfItsOwn(large), batch_size=2)

    look = Look()
    assert fit(loader, look)[:3] == look.found


# What can be read only once is left alone


class Stream(IterableDataset[Tensor]):
    """Can be iterated again and again, but goes on where it was."""

    def __init__(self) -> None:
        self.rest = iter(torch.arange(20.0))

    def __iter__(self) -> Iterator[Tensor]:
        return self.rest


class Endless(DataLoader[Tensor]):
    """Keeps one iterator for all epochs, as loaders that spare their workers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = super().__iter__()

    def __iter__(self) -> Any:
        for _ in range(2):
            yield next(self.kept)


class Wrapped:
    """Does with each pass what nobody can know."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        return iter(torch.arange(4.0) + self.passes)


ONCE: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "iterator": lambda: iter(torch.arange(8.0)),
    "generator": lambda: (x for x in torch.arange(8.0)),
    "kept": lambda: Endless(Drawing(), batch_size=2),
    "of one's own": Wrapped,
    "sampler": lambda: DataLoader(Drawing(), batch_sampler=([i] for i in range(10))),
    "one of two": lambda: {
        "a": DataLoader(Drawing(), batch_size=2),
        "b": DataLoader(Stream(), batch_size=2),
    },
}


@pytest.mark.parametrize("name", ONCE)
def test_what_can_be_read_only_once_is_left_alone(name):
    look = Look()
    seen = fit(ONCE[name], look)
    assert seen == fit(ONCE[name])
    assert look.found == []
    assert len(seen) > 5


def test_before_the_loop_has_loaders_there_is_nothing():
    assert first_batches(make_trainer(), 3) == []


def test_an_error_of_the_data_is_the_users_to_see():
    class Broken(Drawing):
        def __getitem__(self, index: int) -> Tensor:
            raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        fit(lambda: DataLoader(Broken(), batch_size=2), Look())
