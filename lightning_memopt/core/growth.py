"""When memory that grows is a leak, from numbers alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_memopt.core.units import MIB

MIN_STEPS = 50
MIN_BYTES_PER_STEP = MIB / 100
_WINDOWS = 10
_WINDOW_STEPS = MIN_STEPS // _WINDOWS
_LEVELS = 14  # the last one judges some 400,000 steps
_SUSPICIOUS_WINDOWS = 6
# What a line explains of the curve. Of ten values in random order one in 10^5 is above.
_MIN_LINEAR_SHARE = 0.9
# The later half grows by this much of the earlier half: a cache that fills up falls below, a jump
# is out of it.
_MIN_LATER_SHARE, _MAX_LATER_SHARE = 0.85, 2.0
# So does what is judged, of the time before.
_MIN_SHARE_OF_BEFORE = 0.75
_MAX_SHARE_OF_ONE_RISE = 0.5
_NEVER = 2**63


class MemoryGrowthWarning(UserWarning):
    """Memory at the same point of the step grew steadily: something keeps what it should not.

    `MemoryMonitor` warns once a fit. A filter of its own silences it or makes it an error.

    Args:
        text: How fast it grew, since when, and what holds it.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=MemoryGrowthWarning)
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)


@dataclass(frozen=True)
class Growth:
    """A steady growth.

    Attributes:
        since_step: The step at which it began, as far as was looked back.
        until_step: The step up to which it was seen.
        grown_bytes: Bytes that came in between, by the line that fits best.
    """

    since_step: int
    until_step: int
    grown_bytes: int

    @property
    def steps(self) -> int:
        """Steps from the first to the last."""
        return self.until_step - self.since_step

    @property
    def bytes_per_step(self) -> float:
        """Bytes that come with each step."""
        return self.grown_bytes / self.steps


_Point = tuple[int, int]


class GrowthWatch:
    """Tells a leak from all else that memory does, one step after the other.

    Of every few steps the least is kept, with its step: what varies from batch to batch only adds
    to it. Ten such windows in a row are judged. Two windows make one of the next level, of twice
    the length, so that slow leaks are found too, later, and those that come once in many steps. A
    growth is steady if each pair of windows is higher than the pair before, the later half grew
    about as much as the earlier one, so that no single jump is most of it, the time before did not
    grow much faster, and a line explains nearly all of it.

    Attributes:
        growth: What the last judgement found.
        is_suspicious: Whether memory had grown then over about half of the steps it takes to tell.

    Example:
        >>> watch = GrowthWatch()
        >>> found = [watch.add(step, step * 2**20) for step in range(50)]
        >>> found[-1]
        Growth(since_step=0, until_step=49, grown_bytes=51380224)
    """

    def __init__(self) -> None:
        self.is_suspicious = False
        self.growth: Growth | None = None
        self._levels: list[deque[_Point]] = [deque(maxlen=2 * _WINDOWS) for _ in range(_LEVELS)]
        self._closed = 0
        self._low, self._low_step = _NEVER, 0
        self._closes_at: int | None = None

    def add(self, step: int, allocated: int) -> Growth | None:
        """Take what is allocated at the end of a step.

        Args:
            step: The step; each is higher than the one before.
            allocated: Bytes, always read at the same point of the step.

        Returns:
            The steady growth that has been seen until here, the longest that was found; else
            `None`, and `None` at most steps: growth is judged every few steps.
        """
        if allocated < self._low:
            self._low, self._low_step = allocated, step
        if self._closes_at is None:
            self._closes_at = step + _WINDOW_STEPS - 1
        if step < self._closes_at:
            return None
        self._closes_at = step + _WINDOW_STEPS
        point = self._low_step, self._low
        self._low = _NEVER
        return self._close(point, step)

    def _close(self, point: _Point, step: int) -> Growth | None:
        """Append a window, and those of higher levels that it completes."""
        self._closed += 1
        found, closed = None, self._closed
        self.is_suspicious = False
        for windows in self._levels:
            windows.append(point)
            if _is_above_rate(windows, -_SUSPICIOUS_WINDOWS):
                self.is_suspicious |= _is_rising(list(windows)[-_SUSPICIOUS_WINDOWS:])
                found = _judge(list(windows), step) or found
            if closed % 2:
                break
            point = _least(windows[-2], point)
            closed //= 2
        self.growth = found
        return found


def _least(first: _Point, second: _Point) -> _Point:
    return second if second[1] < first[1] else first


def _is_above_rate(windows: deque[_Point], back: int) -> bool:
    """Return whether so many windows grew fast enough at all; most of the time they did not."""
    if len(windows) < -back:
        return False
    (since, low), (until, high) = windows[back], windows[-1]
    return high - low >= MIN_BYTES_PER_STEP * (until - since)


def _rises(windows: Sequence[_Point]) -> list[int]:
    """Return by how much each pair of windows is above the pair before.

    Pairs: what comes every second window is steady too.
    """
    lows = [min(windows[i][1], windows[i + 1][1]) for i in range(0, len(windows), 2)]
    return [after - before for before, after in pairwise(lows)]


def _is_rising(windows: Sequence[_Point]) -> bool:
    return min(_rises(windows)) > 0 and _fit(windows)[1] >= _MIN_LINEAR_SHARE


def _judge(windows: Sequence[_Point], step: int) -> Growth | None:
    before, windows = windows[:-_WINDOWS], windows[-_WINDOWS:]
    if len(windows) < _WINDOWS or not _is_rising(windows):
        return None
    rises = _rises(windows)
    half = len(rises) // 2
    earlier, later = sum(rises[:half]), sum(rises[half:])
    if not _MIN_LATER_SHARE * earlier <= later <= _MAX_LATER_SHARE * earlier:
        return None
    slope, _ = _fit(windows)
    if slope < MIN_BYTES_PER_STEP or _is_slower_than(
        before[len(before) % 2 :], sum(rises) / len(rises)
    ):
        return None
    since = windows[0][0]
    return Growth(since, step, round(slope * (step - since)))


def _is_slower_than(before: Sequence[_Point], rise: float) -> bool:
    """Return whether memory rose more with each pair of windows before, warm-up aside."""
    rises = _rises(before)
    if len(rises) > 1 and max(rises) > _MAX_SHARE_OF_ONE_RISE * sum(rises):
        rises.remove(max(rises))  # what a run allocates once, such as the state of an optimizer
    return len(rises) > 0 and rise < _MIN_SHARE_OF_BEFORE * sum(rises) / len(rises)


def _fit(windows: Sequence[_Point]) -> tuple[float, float]:
    """Return the slope of the line that fits best, and the share of the variance it explains."""
    count = len(windows)
    mean_step = sum(step for step, _ in windows) / count
    mean_low = sum(low for _, low in windows) / count
    steps = [step - mean_step for step, _ in windows]
    lows = [low - mean_low for _, low in windows]
    across = sum(x * x for x in steps)
    up = sum(y * y for y in lows)
    both = sum(x * y for x, y in zip(steps, lows, strict=True))
    return both / across, both * both / (across * up)
