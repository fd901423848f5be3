"""Windows of gradient accumulation, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """How the batches of an epoch fall into windows.

    Attributes:
        batches: Batches of an epoch.
        steps: Batches a window is meant to have.
        count: Windows of an epoch, and so its optimizer steps.
        last: Batches of the last window.
    """

    batches: int
    steps: int
    count: int
    last: int

    def __str__(self) -> str:
        """Say it in half a sentence."""
        return (
            f"{self.count} windows of {self.steps} batches an epoch, the last one of {self.last}, "
            f"{self.count} optimizer steps an epoch"
        )


def plan_windows(batches: int, steps: int) -> Windows:
    """Divide the batches of an epoch into windows of `steps`, the last one shorter if need be.

    Example:
        >>> plan_windows(10, 4)
        Windows(batches=10, steps=4, count=3, last=2)
    """
    count = math.ceil(batches / steps)
    return Windows(batches, steps, count, batches - (count - 1) * steps if count else 0)


def next_boundary(batch_idx: int, old: int, new: int) -> int:
    """Return the first batch, from `batch_idx` on, that begins a window of both lengths.

    Example:
        >>> next_boundary(4, 2, 3)
        6
    """
    both = math.lcm(old, new)
    return -(-batch_idx // both) * both


def steps_at(steps: int | Mapping[int, int], epoch: int) -> int:
    """Return the window length of an epoch: that of the latest entry, 1 before the first.

    Example:
        >>> [steps_at({1: 8, 4: 2}, epoch) for epoch in (0, 1, 3, 4)]
        [1, 8, 8, 2]
    """
    if isinstance(steps, int):
        return steps
    begun = [start for start in steps if start <= epoch]
    return steps[max(begun)] if begun else 1


def steps_asked(
    steps: int | Mapping[int, int], epoch: int, asked: int | None, asked_in: int
) -> int:
    """Return the window length of an epoch where another was asked for in an earlier one.

    What was asked for holds until the next entry of a schedule begins.

    Example:
        >>> [steps_asked({0: 8, 4: 2}, epoch, 3, asked_in=1) for epoch in (1, 3, 4)]
        [3, 3, 2]
    """
    starts = [] if isinstance(steps, int) else steps
    if asked is None or any(asked_in < start <= epoch for start in starts):
        return steps_at(steps, epoch)
    return asked


def optimizer_steps(steps: Callable[[int], int], batches: int, epochs: int) -> int:
    """Return the optimizer steps of a whole run, `steps` being the window length of an epoch."""
    return sum(plan_windows(batches, steps(epoch)).count for epoch in range(epochs))
