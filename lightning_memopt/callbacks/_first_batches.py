"""The first train batches of a run, read without a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_memopt.callbacks._lightning import copy_loader, train_loaders
from lightning_memopt.core.generators import held_by, same_randomness


def first_batches(trainer: pl.Trainer, count: int) -> list[Any]:
    """Return the first train batches, in host memory; training goes on as if nobody had looked.

    The loop's own iterator, the samplers and all random states stay as they are. The batches of one
    loader without workers are those that the loop will get; with workers a shuffled order has been
    drawn by now, and the batches are others of its kind. Tensors that a data set doesn't copy into
    a batch are the data set's own.

    Args:
        trainer: A Trainer whose loop has its loaders, as in `on_train_start`.
        count: Number of batches.

    Returns:
        The batches, fewer where an epoch has fewer; none where a loader can't be read twice: an
        `IterableDataset`, an iterator, or an object that is neither a `DataLoader` nor a sequence.
    """
    loaders = train_loaders(trainer)
    if loaders is None:
        return []
    count = int(min(count, trainer.num_training_batches))
    heads = []
    for loader in loaders.flattened:
        data = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        with same_randomness(trainer.strategy.root_device, *data):
            head = _read(loader, count)
        if head is None:
            return []
        heads.append(head)
    combined = copy.copy(loaders)
    combined.flattened = heads
    return [batch for batch, _, _ in islice(combined, count)]


def _read(loader: Any, count: int) -> list[Any] | None:
    """Return the first batches of one loader, `None` where that would leave a trace."""
    if not isinstance(loader, DataLoader):
        has_items = hasattr(type(loader), "__getitem__") and not isinstance(loader, Mapping)
        if not has_items or (length := sized_len(loader)) is None:
            return None
        return [loader[i] for i in range(min(count, length))]
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    data = {id(each): each for each in held_by(loader.dataset) if isinstance(each, Dataset)}
    data[id(loader.dataset)] = loader.dataset
    try:
        indices = copy.deepcopy(getattr(loader, sampler), data)  # it may count, shuffle or draw
    except Exception:  # whatever an object of the user raises that can't be copied
        return None
    # For the seed of workers: the loop has drawn its own before, so the next draw is a sampler's.
    generator = torch.Generator(torch.get_default_device())
    changes = {
        sampler: list(islice(indices, count)),
        "generator": generator,
        "num_workers": min(loader.num_workers, count),
        "pin_memory": False,
    }
    copied = copy_loader(loader, **changes)
    if any(isinstance(value, Iterator) for value in vars(copied).values()):
        return None
    return list(islice(copied, count))  # nobody holds the iterator: its workers end
