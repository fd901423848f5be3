"""The largest size that fits, from a few sizes that were tried."""

from __future__ import annotations

import math
from collections.abc import Callable

_MAX_TRIALS = 16
_MAX_GROWTH = 8  # of the largest size that fits, in a trial
_CLOSE = 0.01  # of the size: what is nearer isn't worth a trial


def largest_size(
    try_size: Callable[[int], tuple[int, bool]], limit: int, size: int, peak: int, fits: bool
) -> int:
    """Return the largest size found to fit, at most 1 % below the largest that does.

    Memory grows nearly along a line; each trial moves it, and bounds what is left to try.

    Args:
        try_size: Returns the peak of a size in bytes, and whether it fits.
        limit: Bytes that may be needed.
        size: A size that was tried.
        peak: Its peak in bytes.
        fits: Whether it fits.

    Returns:
        The size, 0 where not even one sample fits.

    Example:
        >>> largest_size(lambda n: (100 + 9 * n, 100 + 9 * n <= 1000), 1000, 8, 172, True)
        100
    """
    peaks = {size: peak}
    best, failing = (size, None) if fits else (0, size)
    is_stuck = False
    for _ in range(_MAX_TRIALS):
        close = max(1, int(_CLOSE * best))
        if failing is None:
            candidate = max(best + close, min(_on_line(peaks, limit), _MAX_GROWTH * best))
        elif failing - best <= close:
            break
        elif is_stuck:  # a line says little where another phase peaks, or memory is cut up
            candidate = max(best + 1, math.isqrt(failing * best))
        else:
            candidate = min(max(best + close, _on_line(peaks, limit)), failing - 1)
        before = math.inf if failing is None else failing - best
        peaks[candidate], does_fit = try_size(candidate)
        if does_fit:
            best = candidate
        else:
            failing = candidate
        is_stuck = failing is not None and failing - best > before / 2
    return best


def _on_line(peaks: dict[int, int], limit: int) -> int:
    """Return the size whose peak is the limit, on the line through the two peaks nearest to it."""
    sizes = sorted(sorted(peaks, key=lambda size: (abs(peaks[size] - limit), -size))[:2])
    small, large = sizes[0], sizes[-1]
    rise = peaks[large] - peaks[small]
    if small == large:
        return 2 * large if peaks[large] < limit else max(1, large // 2)
    if rise <= 0:
        return _MAX_GROWTH * large if peaks[large] < limit else 1
    return max(1, large + (limit - peaks[large]) * (large - small) // rise)
