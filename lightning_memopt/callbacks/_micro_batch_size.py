"""The samples that a run does at once: given, restored, found, asked for or lowered."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_memopt.callbacks._effective_batch import EffectiveBatch
from lightning_memopt.callbacks._lightning import PointWriter, logged_step
from lightning_memopt.callbacks._search import NothingRanError, Search
from lightning_memopt.callbacks._search_report import Found
from lightning_memopt.callbacks._split_step import SplitStep


class MicroBatchSize:
    """The one number that a run is cut by, and who may change it when.

    Args:
        trainer: The Trainer, about to train.
        step: Cuts batches by it.
        search: Finds it.
        effective: Lets the loader give micro-batches by it.
        writer: Takes it.

    Attributes:
        chosen: Samples done at once; `None` leaves batches whole.
        largest: The largest number of samples that was found to fit, if there was a search.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        step: SplitStep,
        search: Search,
        effective: EffectiveBatch,
        writer: PointWriter,
    ) -> None:
        self._trainer = trainer
        self._step = step
        self._search = search
        self._effective = effective
        self._writer = writer
        self._logged: dict[str, float] = {}
        self._is_search_due = False
        self.chosen: int | None = None
        self.largest: int | None = None

    def use(self, size: int | None, why: str, largest: int | None = None) -> None:
        """Cut by `size` from the next batch on, and say why."""
        self.chosen = self._step.micro_batch_size = size
        self.largest = largest or self.largest
        self._effective.use_micro_batches(size)
        if self._effective.is_cut:
            self._step.warn_of_coupling()
        at_once = "whole batches" if size is None else f"at most {size} samples"
        rank_zero_info(f"AutoAccumulation: {at_once} at once, {why}; {self._effective}")
        self.log()

    def search(self) -> None:
        """Look at the first batches of the loader and use what fits."""
        self._effective.use_micro_batches()  # whole optimizer steps, to look at
        try:
            found = self._search.in_loader()
        except NothingRanError:
            # A hook that comes later may make what the step needs.
            if self._effective.samples is not None:
                raise
            found = None
        # What can be read only once is looked at when it comes.
        self._is_search_due = found is None
        if found is not None:
            self._use_found(found)

    def answer(self, asked: tuple[int | None, ...], batch: Any = None) -> None:
        """Do what was asked for last, before `batch` where batches are cut on the device."""
        if not asked and not self._is_search_due:
            return
        size = asked[-1] if asked else None
        self._is_search_due = False
        if size is not None:
            self.use(size, "as asked for")
        elif batch is None:
            self.search()
        else:
            self._use_found(self._search.in_batch(batch))

    def take_from_step(self, line: str) -> None:
        """The step has cut a batch into smaller parts: they are used from now on."""
        self.chosen = self._step.micro_batch_size
        rank_zero_info(f"AutoAccumulation: {line}")

    def log(self) -> None:
        """Write a point, if anything has changed since the last one."""
        values = {"accumulation/recoveries": float(self._step.recoveries)}
        if self.chosen is not None:
            values["accumulation/micro_batch_size"] = float(self.chosen)
        if values != self._logged:
            self._logged = values
            self._writer.add(values, logged_step(self._trainer))

    def _use_found(self, found: Found) -> None:
        why = "as found" if found.chosen else "as sizes can't be tried"
        self.use(found.chosen, why, found.largest)
