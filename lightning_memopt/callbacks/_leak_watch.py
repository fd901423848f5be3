"""Watches the memory of each step for a leak, and names who holds it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

from lightning_memopt.callbacks._base import callbacks_of
from lightning_memopt.callbacks._holders import holders_of
from lightning_memopt.callbacks._leak_report import (
    describe_census,
    describe_growth,
    describe_holders,
)
from lightning_memopt.core.growth import MIN_STEPS, Growth, GrowthWatch, MemoryGrowthWarning
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.memory_limits import usable_bytes
from lightning_memopt.core.tensor_census import TensorCensus, compare_census, take_census
from lightning_memopt.core.tensor_holders import (
    GrownHolder,
    Holding,
    bytes_at_hand,
    grown_holders,
)
from lightning_memopt.core.units import format_bytes

# What may be a cache that settles, or can't be named, must grow over two windows of judgement,
# which are not exactly as long as said.
_MANY_STEPS = 2 * MIN_STEPS - 10
_MIN_STEPS_BETWEEN_LOOKS = 20
# Of the growth, to be named, and to be blamed without further evidence.
_MIN_SHARE_OF_NAMED = 0.05
_MIN_SHARE_OF_BLAMED = 0.25


class LeakWatch:
    """Warns once a fit when memory at the same point of the step keeps growing.

    A step costs a look at its batch and outputs, and two comparisons: memory must grow with them
    and without them, so that batches in ascending length are no leak. Once memory looks as if it
    grew, the first look at what holds tensors is taken; when the growth is certain, the second
    tells what holds more. Looks become rarer, so that a curve which looks like a leak time and
    again costs little. Garbage in cycles, which is collected at each look, and a `deque` with a
    `maxlen` are no leak.

    Args:
        device: The device whose memory is watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch: GrowthWatch | None = GrowthWatch()
        self._without_batches = GrowthWatch()
        self._fetches_ahead: bool | None = None
        self._first: tuple[int, dict[str, Holding]] | None = None
        self._census: tuple[int, TensorCensus] | None = None
        self._offset = 0
        self._next_look, self._steps_between_looks = 0, MIN_STEPS
        self._next_judgement = self._least_steps = 0

    def add(
        self,
        trainer: pl.Trainer,
        step: int,
        allocated: int,
        peak: int,
        outputs: Any = None,
        batch: Any = None,
    ) -> None:
        """Take the figures of a step.

        Args:
            trainer: The Trainer.
            step: The step.
            allocated: Bytes at its end.
            peak: Bytes at its peak.
            outputs: What it returned.
            batch: Its batch.
        """
        watch, without = self._watch, self._without_batches
        if watch is None:
            return
        allocated += self._offset
        with_batches = watch.add(step, allocated)
        growth = without.add(step, allocated - self._at_hand(trainer, outputs, batch))
        if with_batches is None:
            growth = None
        is_suspicious = watch.is_suspicious and without.is_suspicious
        # What is being judged keeps its first look.
        is_judged = watch.growth is not None and without.growth is not None
        is_new = is_suspicious and not is_judged and step >= self._next_look
        if growth is None and not is_new:
            return
        category: type[Warning] = MemoryGrowthWarning
        try:
            if is_new or self._first is None:
                self._look(trainer, step)
            text = None if growth is None else self._judge(trainer, step, growth, peak)
        except Exception as error:  # whatever the user's objects do, training goes on
            category = UserWarning
            text = f"`MemoryMonitor` watches for leaks no more, its search failed: {error!r}."
        if text is not None:
            self._watch = self._first = self._census = None
            warnings.warn(text, category, stacklevel=2)

    def _at_hand(self, trainer: pl.Trainer, outputs: Any, batch: Any) -> int:
        """Return the bytes of the batch and the outputs, which are alive when a step ends."""
        at_hand = bytes_at_hand((outputs, batch), self._device)
        if self._fetches_ahead is None:
            self._fetches_ahead = self._device.type == "cpu" and not _is_sized(trainer)
        if self._fetches_ahead:
            at_hand += bytes_at_hand(batch, self._device)  # about what the next one has
        return at_hand

    def _look(self, trainer: pl.Trainer, step: int) -> None:
        """Take the first look, and let garbage go that would go later and hide what grows."""
        with self._left_out():
            gc.collect()
            self._first = step, holders_of(trainer)
        self._next_look = step + self._steps_between_looks
        self._steps_between_looks *= 2
        self._wait(step)

    def _judge(self, trainer: pl.Trainer, step: int, growth: Growth, peak: int) -> str | None:
        """Take the second look, and return what is to be said."""
        if self._first is None or step < self._next_judgement or growth.steps < self._least_steps:
            return None
        since, before = self._first
        added = growth.bytes_per_step * min(step - since, growth.steps)
        is_garbage = self._collect() > added / 2
        named = [
            holder
            for holder in grown_holders(before, holders_of(trainer))
            if holder.has_more_graph or holder.more_bytes >= _MIN_SHARE_OF_NAMED * added
        ]
        holders = [holder for holder in named if not holder.now.is_bounded]
        bounded = sum(holder.more_bytes for holder in named if holder.now.is_bounded)
        if is_garbage or (bounded >= added / 2 and not holders):
            self._least_steps = 2 * growth.steps
            return None
        if not holders and self._census is None:
            with self._left_out():
                self._census = step, take_census()
            self._wait(step)
            return None
        if not _are_to_blame(holders, added) and growth.steps < _MANY_STEPS:
            self._least_steps = _MANY_STEPS
            return None
        if holders:
            names = [type(callback).__name__ for callback in callbacks_of(trainer)]
            who = describe_holders(holders, since, names, _end_of_epoch(trainer, step, growth))
        elif self._census is not None:
            counted_at, census = self._census
            who = describe_census(compare_census(census), counted_at, step)
        rank = f" of rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        limit = usable_bytes(self._device)
        return f"`MemoryMonitor`{rank}: {describe_growth(growth, limit, peak)}. {who}"

    def _wait(self, step: int) -> None:
        self._next_judgement = max(self._next_judgement, step + _MIN_STEPS_BETWEEN_LOOKS)

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        """Leave out of the curve what a search itself frees and keeps."""
        before = self._allocated()
        yield
        self._offset += before - self._allocated()

    def _collect(self) -> int:
        """Collect garbage and return how many bytes it held."""
        before = self._allocated()
        gc.collect()
        return before - self._allocated()

    def _allocated(self) -> int:
        return memory_reader(self._device).read().allocated


def _is_sized(trainer: pl.Trainer) -> bool:
    """Return whether loaders tell their length; of others Lightning fetches a batch ahead."""
    try:
        loaders = CombinedLoader(trainer.train_dataloader).flattened
        return all(sized_len(loader) is not None for loader in loaders)
    except Exception:  # whatever the user's loaders do
        return True


def _are_to_blame(holders: list[GrownHolder], added: float) -> bool:
    """Return whether there is no doubt: a list, or a graph, and it holds enough of what came."""
    return any(
        holder.has_more_graph
        or (
            holder.now.kind not in ("dict", "Tensor")
            and holder.more_bytes >= _MIN_SHARE_OF_BLAMED * added
        )
        for holder in holders
    )


def _end_of_epoch(trainer: pl.Trainer, step: int, growth: Growth) -> str:
    """Say what will have come by the end of the epoch, where many empty their lists."""
    batches = trainer.num_training_batches
    if batches == float("inf"):
        return ""
    left = (int(batches) - 1 - trainer.fit_loop.batch_idx) // trainer.accumulate_grad_batches
    if left <= 0:
        return ""
    more = format_bytes(left * growth.bytes_per_step)
    return f"; if that is done when the epoch ends (step {step + left}), it is {more} more by then"
