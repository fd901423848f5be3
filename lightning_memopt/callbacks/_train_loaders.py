"""The train loader of a run, replaced by one with smaller batches of which several are a step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_memopt.callbacks._lightning import copy_loader, set_train_loaders, train_loaders
from lightning_memopt.core.generators import same_randomness
from lightning_memopt.core.micro_batch_sampler import MicroBatchSampler


def samples_per_batch(trainer: pl.Trainer) -> int | None:
    """Return the batch size of the train loader on a rank, `None` where it can't be told.

    It is that of the loader that the user made: `MicroBatches` is not in use yet.
    """
    loaders = train_loaders(trainer)
    loader = loaders.flattened[0] if loaders is not None and len(loaders.flattened) == 1 else None
    batches = getattr(loader, "batch_sampler", None)
    return batches.batch_size if type(batches) is BatchSampler else None


def steps_per_epoch(trainer: pl.Trainer, samples: int) -> int | None:
    """Return the batches of `samples` samples in an epoch, `None` where `MicroBatches` can't be.

    `MicroBatches` is not in use yet.
    """
    loaders = train_loaders(trainer)
    if loaders is None or _obstacle(loaders) is not None:
        return None
    (loader,), limit = loaders.flattened, trainer.num_training_batches
    batches = loader.batch_sampler
    steps = len(BatchSampler(batches.sampler, samples, batches.drop_last))
    if limit < len(batches):
        steps = min(steps, -(-int(limit) * batches.batch_size // samples))
    return steps


class MicroBatches:
    """The loop's train loader, replaced by one whose batches are pieces of larger ones.

    The sampler is Lightning's, distributed or not, and the rest of the loader the user's. With
    `accumulate_grad_batches` set to the number of pieces, an epoch has the optimizer steps and the
    samples of a loader with batches of `samples`: `drop_last` drops a short one of these, a limit
    on the batches of the Trainer holds for its samples up to the next whole batch, and validation
    comes where it came before, to about a step.

    The order of samples is that of the large loader too, unless workers draw it from a generator:
    the replaced loader has then drawn once already, and another order follows.

    Args:
        trainer: A Trainer whose loop has its loaders, as in `on_train_start`.
        samples: Samples for an optimizer step, on this rank.

    Raises:
        MisconfigurationException: There are several loaders or one of another kind, or its samples
            don't make one step.
    """

    def __init__(self, trainer: pl.Trainer, samples: int) -> None:
        self._trainer, self._samples = trainer, samples
        self._ours: CombinedLoader | None = None
        self._parts = 0
        self._look()

    def use(self, parts: int) -> None:
        """Make the loop's batches pieces of which `parts` are an optimizer step.

        Call it in `on_train_start`, and again in each `on_train_epoch_start`: there is nothing to
        do unless Lightning has reloaded its loaders, or `parts` has changed.

        Args:
            parts: Pieces for an optimizer step.
        """
        trainer, loaders = self._trainer, train_loaders(self._trainer)
        if loaders is not self._ours:
            self._look()
        elif parts == self._parts:
            return
        stock: DataLoader[Any] = self._stock.flattened[0]
        batches: Any = stock.batch_sampler
        pieces = MicroBatchSampler(batches.sampler, self._samples, parts, batches.drop_last)
        changes = {"batch_sampler": pieces, "batch_size": pieces.batch_size}
        self._ours, self._parts = copy.copy(self._stock), parts
        self._ours.flattened = [copy_loader(stock, **changes)]
        trainer.fit_loop.max_batches = length = min(self._steps * parts, len(pieces))
        self._ours.limits = [length]
        trainer.val_check_batch = self._validate_after(length)
        # Without workers the order is drawn with the first batch, and the seed for workers that an
        # iterator draws at once is drawn for nothing.
        unchanged = same_randomness(trainer.strategy.root_device, stock.generator)
        with nullcontext() if stock.num_workers else unchanged:
            set_train_loaders(trainer, self._ours)

    def put_back(self) -> None:
        """Give the loop its own loader again, when training is over."""
        if self._ours is not None and train_loaders(self._trainer) is self._ours:
            set_train_loaders(self._trainer, self._stock, fetch=False)
            self._trainer.fit_loop.max_batches = self._length
            self._trainer.val_check_batch = self._val_check_batch

    def _look(self) -> None:
        """Take the loaders that the loop has for those to replace."""
        loaders = train_loaders(self._trainer)
        obstacle = "no loader yet" if loaders is None else _obstacle(loaders)
        if loaders is None or obstacle is not None:
            raise MisconfigurationException(
                '`split="loader"` needs one `DataLoader` that makes batches of what its sampler '
                f'gives, got {obstacle}: use `split="step"`, which cuts the batches that come.'
            )
        self._stock = loaders
        self._steps = steps_per_epoch(self._trainer, self._samples) or 0
        self._length = self._trainer.num_training_batches
        self._val_check_batch = self._trainer.val_check_batch
        if self._steps == 0:
            raise MisconfigurationException(
                f"An epoch has fewer than the {self._samples} samples of an optimizer step and "
                "`drop_last=True` leaves none: lower the effective batch size or keep the last one."
            )

    def _validate_after(self, length: int) -> int | float | None:
        """Return the pieces between validations: whole steps, so few that no validation is lost."""
        before = self._val_check_batch
        if before is None or before == float("inf"):
            return before
        if before == self._length:
            return length
        steps = round(before * length / (self._length * self._parts))
        times = int(self._length // before)
        if not times:  # less than one an epoch: counted through all epochs
            return max(1, steps) * self._parts
        steps = max(1, min(steps, length // (times * self._parts)))
        return min(steps * self._parts, length)


def _obstacle(loaders: CombinedLoader) -> str | None:
    """Return what keeps a loader from being replaced, in the user's words."""
    if len(loaders.flattened) != 1:
        return f"{len(loaders.flattened)} loaders"
    (loader,) = loaders.flattened
    if not isinstance(loader, DataLoader):
        return f"a `{type(loader).__name__}`"
    if isinstance(loader.dataset, IterableDataset):
        return f"a `{type(loader.dataset).__name__}`, which is an `IterableDataset`"
    if loader.batch_sampler is None:
        return "one with `batch_size=None`"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"a batch sampler of your own, `{type(loader.batch_sampler).__name__}`"
    if (length := sized_len(loader.batch_sampler)) is None:
        return f"a sampler without a length, `{type(loader.batch_sampler.sampler).__name__}`"
    if len(loader) != length:
        return f"a `{type(loader).__name__}` with a length of its own"
    if hasattr(loader, "load_state_dict"):
        return f"a `{type(loader).__name__}`, which resumes from a place in its own batches"
    return None
