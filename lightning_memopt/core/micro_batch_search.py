"""The largest micro-batch that fits, from the peaks of a few trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_TRIALS = 16
_FIRST = 1 / 32  # of the samples: peaks of smaller sizes are mostly noise and the model's own part
_LEAP = 0.9  # of the size that would reach the limit if the model's own part were nothing
_LITTLE = 1.2  # where a leap is no farther, a smaller second size is the safer one
_LEVER = 0.75  # of the larger size: two that lie closer together give the slope of the noise
_HOPE = 1.005  # of the limit: what is expected to need more doesn't fit
_AIM, _CLOSE = 0.98, 0.97  # of the largest size that may fit: what to try, what is enough
_EXPLAINED = 4 / 3  # of a failing size: peaks that reach the limit later don't explain it
_SAME_SPEED = 0.98  # of the best throughput


@dataclass(frozen=True)
class Trial:
    """What the training step of a micro-batch was found to need.

    Attributes:
        size: Samples.
        peak: Bytes at the peak, `None` where it ran out of memory or the peak isn't known.
        seconds: Time of forward and backward, `None` where it failed or isn't known.
        fits: Whether it ran and kept within the limit.
    """

    size: int
    peak: int | None
    seconds: float | None
    fits: bool


class MicroBatchSearch:
    """Finds the largest micro-batch whose training step keeps within a limit.

    Memory grows nearly along a line: two trials tell where it meets the limit, and the search ends
    when no size more than 3 % larger than one that ran is expected to fit, after 2 to 4 trials
    mostly and seldom more than 6. Where peaks aren't known, or don't explain why a size failed,
    sizes are bisected down to the exact one, in at most 16 trials. A size that fails speaks against
    all larger ones, even against one that ran.

    Args:
        samples: Samples of the batch, at least one, to be cut into parts as even as possible.
        limit: Bytes that a step may need; with `None` only running out of memory bounds it.

    Example:
        >>> search = MicroBatchSearch(samples=512, limit=1000)
        >>> while (size := search.next_size()) is not None:
        ...     peak = 95 + 9 * size
        ...     search.add(Trial(size, peak, seconds=9 + size, fits=peak <= 1000))
        >>> [trial.size for trial in search.trials], search.largest, search.chosen
        ([16, 57, 86, 99], 99, 86)
    """

    def __init__(self, samples: int, limit: int | None) -> None:
        self.samples = samples
        self.limit = limit
        self.trials: list[Trial] = []

    def add(self, trial: Trial) -> None:
        """Take note of what a trial gave."""
        self.trials.append(trial)

    @property
    def smallest_failing(self) -> int | None:
        """The smallest size tried that doesn't fit, `None` if there is none."""
        return min((trial.size for trial in self.trials if not trial.fits), default=None)

    @property
    def is_minimum_failing(self) -> bool:
        """Whether even one sample was tried and doesn't fit."""
        return self.smallest_failing == 1

    @property
    def largest(self) -> int | None:
        """The largest size tried that fits, below every failing one; `None` if there is none."""
        return max((trial.size for trial in self._fitting()), default=None)

    @property
    def chosen(self) -> int | None:
        """The size to train with, one that ran and fits; `None` if there is none.

        The whole batch if it fits: what isn't split trains as it always did. Else, of the sizes
        of even parts, the smallest within 2 % of the best throughput; not one below a quarter of
        the largest, as its time is mostly noise. The largest where its time isn't known.
        """
        even = {t.size: t.seconds for t in self._fitting() if self._even(t.size) == t.size}
        if not even:
            return self.largest
        most = max(even)
        speeds = {size: size / time for size, time in even.items() if time and 4 * size >= most}
        if most == self.samples or most not in speeds:
            return most
        best = max(speeds.values())
        return min(size for size, speed in speeds.items() if speed >= _SAME_SPEED * best)

    def next_size(self) -> int | None:
        """Return the size to try next, never one tried before; `None` when the search is over."""
        if not self.trials:
            # A single sample is left for last: BatchNorm may refuse it.
            return self.samples if self.samples <= 4 else max(2, int(_FIRST * self.samples))
        low = max(self._fitting(), key=lambda trial: trial.size, default=None)
        if low is None:
            return (self.smallest_failing or 0) // 2 or None
        better = self._better(low) if len(self.trials) < _MAX_TRIALS - 1 else None
        size = self._even(low.size) if better is None else better
        return None if self._is_tried(size) else size

    def _better(self, low: Trial) -> int | None:
        """Return a size that may lead beyond `low`, the largest that fits, or `None`."""
        failing = self.smallest_failing
        top = self.samples if failing is None else failing - 1
        if low.size >= top:
            return None
        reach = self._reach(low)
        if reach is None:
            return self._second(low)
        if failing is not None and reach[0] >= failing:
            is_enough = reach[0] <= _EXPLAINED * failing and low.size >= _CLOSE * top
            return None if is_enough else (low.size + failing) // 2
        expected, hoped = (int(min(max(size, low.size), top)) for size in reach)
        if low.size < _CLOSE * hoped:
            even = self._even(expected)
            return even if even > low.size else math.ceil(_AIM * hoped)
        # Even parts differ by more than 3 % while they are few: a few samples may save one.
        even = self._even(hoped)
        return even if self._even(low.size) < _CLOSE * even else None

    def _second(self, low: Trial) -> int:
        """Return a size that makes a line with `low`, the only one with a known peak if any."""
        factor = 4.0
        if self.limit is not None and low.peak is not None:
            factor = _LEAP * self.limit / low.peak if low.peak else math.inf
        half = low.size // 2
        if factor < _LITTLE and half > 1 and not self._is_tried(half):
            return half
        if self.smallest_failing is not None:
            return (low.size + self.smallest_failing) // 2
        return self._even(int(min(max(factor, 2.0) * low.size, self.samples)))

    def _reach(self, low: Trial) -> tuple[float, float] | None:
        """Return the sizes at which the line through `low` meets the limit and `_HOPE` of it."""
        if self.limit is None or low.peak is None:
            return None
        peaks = {trial.size: trial.peak for trial in self.trials if trial.peak is not None}
        failing = self.smallest_failing
        if failing is not None and peaks.get(failing, 0) > self.limit:
            others = [failing]
        else:
            smaller = sorted(size for size in peaks if size < low.size)
            others = [size for size in smaller if size <= _LEVER * low.size] or smaller[:1]
        if not others:
            return None
        slope = (peaks[others[-1]] - low.peak) / (others[-1] - low.size)
        if slope <= 0:
            return math.inf, math.inf
        expected = low.size + (self.limit - low.peak) / slope
        return expected, expected + (_HOPE - 1) * self.limit / slope

    def _even(self, size: int) -> int:
        """Return the samples of the largest part when parts of at most `size` are made even."""
        return math.ceil(self.samples / math.ceil(self.samples / size))

    def _is_tried(self, size: int) -> bool:
        return any(trial.size == size for trial in self.trials)

    def _fitting(self) -> list[Trial]:
        """Return the trials that fit, below every failing one."""
        failing = self.smallest_failing or math.inf
        return [trial for trial in self.trials if trial.fits and trial.size < failing]


def next_parts(samples: int, parts: int) -> int | None:
    """Return how many parts to cut a batch into after `parts` of them ran out of memory.

    Args:
        samples: Samples of the batch.
        parts: Parts of which one was too large.

    Returns:
        The next divisor of `samples` if it is at most twice `parts`, else twice `parts`, which is
        below `samples` then; `None` where a part has a single sample already.

    Example:
        >>> next_parts(12, 2), next_parts(7, 2), next_parts(7, 7)
        (3, 4, None)
    """
    if parts >= samples:
        return None
    return next((n for n in range(parts + 1, 2 * parts) if samples % n == 0), 2 * parts)
