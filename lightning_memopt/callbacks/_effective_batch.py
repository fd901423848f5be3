"""How many samples an optimizer step has, and the factor and the loader that give them."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from lightning_memopt.callbacks._train_loaders import (
    MicroBatches,
    samples_per_batch,
    steps_per_epoch,
)
from lightning_memopt.core.accumulation import optimizer_steps


class EffectiveBatch:
    """Reaches an effective batch size by `accumulate_grad_batches`, or by a loader of its own.

    Args:
        trainer: The Trainer, in `setup`.
        size: Samples of an optimizer step over all ranks; `None` for what loader and Trainer give.
        by_loader: Whether the loader is to give micro-batches.

    Attributes:
        samples: Samples of an optimizer step on this rank, known with `by_loader` after `plan`.
    """

    def __init__(self, trainer: pl.Trainer, size: int | None, by_loader: bool) -> None:
        self._trainer = trainer
        self._size = size
        self._by_loader = by_loader
        self._factor = trainer.accumulate_grad_batches
        self._micro_batches: MicroBatches | None = None
        self._is_planned = False
        self.samples: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is anything to reach beyond what loader and Trainer give."""
        return self._by_loader or self._size is not None

    @property
    def is_cut(self) -> bool:
        """Whether the loader gives micro-batches now."""
        return self.samples is not None and self._trainer.accumulate_grad_batches > 1

    def plan(self) -> None:
        """Set the factor; the loop has its loaders. Done once.

        Raises:
            MisconfigurationException: The size can't be reached with this loader.
        """
        if self._is_planned or not self.is_given or self._trainer.limit_train_batches == 0:
            return
        self._is_planned = True
        in_batch, ranks = samples_per_batch(self._trainer), self._trainer.world_size
        if in_batch is None and (self._size is None or not self._by_loader):
            raise MisconfigurationException(
                "`AutoAccumulation` can't tell the batch size of the train loader, as it has "
                "several loaders or a batch sampler of its own: leave out `effective_batch_size`, "
                'use `split="step"`, and accumulate by `Trainer(accumulate_grad_batches=...)`.'
            )
        if self._by_loader:
            asked = self._size or (in_batch or 0) * self._factor * ranks
            self.samples = max(1, round(asked / ranks))
            reached = self.samples * ranks
            self._trainer.accumulate_grad_batches = 1
        else:
            asked, given = self._size or 0, (in_batch or 0) * ranks
            if asked < given:
                raise MisconfigurationException(
                    f"`effective_batch_size` is {asked}, but the loader gives {given} samples at "
                    'once over all ranks: lower its batch size, or use `split="loader"`.'
                )
            factor = round(asked / given)
            reached = factor * given
            self._trainer.accumulate_grad_batches = factor
        if reached != asked:
            rank_zero_info(
                f"AutoAccumulation: an effective batch of {reached}, the nearest to {asked} that "
                f"{'the ranks' if self._by_loader else 'whole batches of the loader'} make"
            )

    def __str__(self) -> str:
        """Say what it is."""
        factor, ranks = self._trainer.accumulate_grad_batches, self._trainer.world_size
        if self.samples is not None:
            return f"{factor} micro-batches a step, {self.samples * ranks} samples over all ranks"
        return f"{factor} batch{'es' if factor > 1 else ''} of the loader a step"

    def count_steps(self, batches: int, epochs: int) -> int:
        """Return the optimizer steps of a run, whose loader has been asked for its length."""
        self.plan()
        if self.samples is None:
            return optimizer_steps(
                lambda epoch: self._trainer.accumulate_grad_batches, batches, epochs
            )
        return (steps_per_epoch(self._trainer, self.samples) or 0) * epochs

    def use_micro_batches(self, size: int | None = None) -> None:
        """Let the loader give at most `size` samples at once, or whole optimizer steps of them."""
        if self.samples is None:
            return
        if self._micro_batches is None:
            self._micro_batches = MicroBatches(self._trainer, self.samples)
        parts = math.ceil(self.samples / (size or self.samples))
        self._micro_batches.use(parts)
        self._trainer.accumulate_grad_batches = parts

    def put_back(self) -> None:
        """Give the Trainer its factor and its loader again."""
        self._trainer.accumulate_grad_batches = self._factor
        if self._micro_batches is not None:
            self._micro_batches.put_back()
