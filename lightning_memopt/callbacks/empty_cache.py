"""Give cached memory back to the device when that pays."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_memopt.callbacks._base import ToggledCallback
from lightning_memopt.callbacks._lightning import PointWriter, is_window_end, logged_step
from lightning_memopt.core.cache_policy import FragmentationRule, complaint
from lightning_memopt.core.checks import check_fraction, check_positive_int, check_words
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.units import GIB, format_bytes, parse_size

WORDS = (
    "never",
    "step",
    "epoch",
    "before_validation",
    "after_validation",
    "before_optimizer_step",
    "fragmented",
)

# A vote makes the host wait for the device and for the other ranks.
_STEPS_BETWEEN_VOTES = 50


class EmptyCache(ToggledCallback):
    """Give memory that is reserved but not allocated back to the device, at chosen moments.

    You gain room for other processes and for one large allocation where the cache is fragmented;
    you pay for each call: the device is waited for, and what is needed again must be asked for
    again. Don't use it to lower the peak of tensors, which it can't. Each call logs what it gave
    back and its time (`cache/freed_gib`, `cache/empty_ms`); one warning says when the calls give
    nothing back or take more than 3 % of the time. On a CPU it trims malloc's heap.

    Args:
        when: One moment or several: `"never"`, `"step"`, `"epoch"`, `"before_validation"`,
            `"after_validation"`, `"before_optimizer_step"`, or `"fragmented"`: after a step in
            which the gap between reserved and allocated is above both limits below. All ranks call
            at the same step; with several, `"fragmented"` looks at every 50th step at most.
        every: Optimizer steps between two calls of `"step"`, `"before_optimizer_step"` and
            `"fragmented"`. Raising it makes calls rarer.
        above: Share of reserved memory that the gap must exceed for `"fragmented"`, from 0 to 1.
        min_gap: Size that the gap must exceed for `"fragmented"`; a share is of the device's total.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, empty or an unknown word.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[EmptyCache("before_validation")], logger=False)

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html.
    """

    owns = "the allocator's cache"

    def __init__(
        self,
        when: str | list[str] = "fragmented",
        every: int = 1,
        above: float = 0.25,
        min_gap: int | str = "1GiB",
    ) -> None:
        check_words("when", when, WORDS)
        check_positive_int("every", every)
        check_fraction("above", above)
        parse_size(min_gap, "min_gap")
        self.when = when
        self.every = every
        self.above = above
        self.min_gap = min_gap

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at the device and say when its cache will be emptied."""
        super().setup(trainer, pl_module, stage)
        self._moments = {self.when} if isinstance(self.when, str) else set(self.when)
        self._reader = memory_reader(trainer.strategy.root_device)
        self._writer = PointWriter(trainer)
        self.undo.callback(self._let_go)
        min_gap = parse_size(self.min_gap).of(self._reader.read().device_total or 0)
        self._rule = FragmentationRule(self.above, min_gap, self.every)
        self._calls = self._freed = 0
        self._seconds = 0.0
        self._last_step: int | None = None
        self._complained = False
        if stage == "fit":
            limits = ""
            if "fragmented" in self._moments:
                limits = f" (a gap above {self.above:.0%} of reserved and {format_bytes(min_gap)})"
            rank_zero_info(f"EmptyCache: when {', '.join(sorted(self._moments))}{limits}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock that the calls are held against."""
        self._began = time.monotonic()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Call before the optimizer step."""
        again = self._last_step == logged_step(trainer)  # of several optimizers
        if self._is_due("before_optimizer_step", trainer) and not again:
            self._empty(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Call after an optimizer step, always or if memory is fragmented."""
        if not is_window_end(trainer):
            return
        looks = self.enabled and "fragmented" in self._moments
        if self._is_due("step", trainer) or (looks and self._is_fragmented(trainer)):
            self._empty(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call at the end of an epoch."""
        self._empty_at("epoch", trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call before validation."""
        self._empty_at("before_validation", trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call after validation."""
        self._empty_at("after_validation", trainer)

    def _empty_at(self, moment: str, trainer: pl.Trainer) -> None:
        if self.enabled and moment in self._moments:
            self._empty(trainer)

    def _is_due(self, moment: str, trainer: pl.Trainer) -> bool:
        return (
            self.enabled
            and moment in self._moments
            and (logged_step(trainer) + 1) % self.every == 0
        )

    def _is_fragmented(self, trainer: pl.Trainer) -> bool:
        step = logged_step(trainer)
        if trainer.world_size > 1 and step % max(self.every, _STEPS_BETWEEN_VOTES):
            return False
        reading = self._reader.read()
        since = None if self._last_step is None else step - self._last_step
        mine = self._rule.is_met(reading.allocated, reading.reserved, since)
        if trainer.world_size == 1:
            return mine
        # A rank that waits for its device holds all others up: better all at once.
        vote = torch.tensor(float(mine), device=trainer.strategy.root_device)
        return bool(trainer.strategy.all_gather(vote).sum() > 0)

    def _empty(self, trainer: pl.Trainer) -> None:
        before = self._reader.read().reserved
        start = time.perf_counter()
        self._reader.release_cache()
        seconds = time.perf_counter() - start
        freed = max(0, before - self._reader.read().reserved)
        self._calls += 1
        self._freed += freed
        self._seconds += seconds
        self._last_step = logged_step(trainer)
        values = {"cache/freed_gib": freed / GIB, "cache/empty_ms": seconds * 1000}
        self._writer.add(values, self._last_step)
        if not self._complained and trainer.state.fn == "fit" and not trainer.sanity_checking:
            elapsed = time.monotonic() - self._began
            wrong = complaint(self._calls, self._seconds, self._freed, elapsed)
            if wrong is not None:
                self._complained = True
                rank_zero_warn(
                    f"`EmptyCache(when={self.when!r})`: {wrong}; call it less often, or not at all."
                )

    def _let_go(self) -> None:
        self._writer.flush()
        del self._writer, self._reader  # loggers and devices don't pickle
