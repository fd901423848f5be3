"""The largest size that fits, from a few sizes that were tried."""

from __future__ import annotations

from collections.abc import Callable

_MAX_TRIALS = 16
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
    for _ in range(_MAX_TRIALS):
        if failing is not None and failing - best <= max(1, _CLOSE * best):
            break
        candidate = max(_candidate(peaks, limit), best + 1)
        if failing is not None:
            # What failed although the line says it fits was cut up too much: well below it, then.
            candidate = min(candidate, failing - max(1, (failing - best) // 4))
        peaks[candidate], does_fit = try_size(candidate)
        if does_fit:
            best = candidate
        else:
            failing = candidate
    return best


def _candidate(peaks: dict[int, int], limit: int) -> int:
    sizes = sorted(peaks, key=lambda size: abs(peaks[size] - limit))[:2]
    if len(sizes) == 1:
        size = sizes[0]
        return size * 2 if peaks[size] < limit else max(1, size // 2)
    small, large = sorted(sizes)
    slope = (peaks[large] - peaks[small]) / (large - small)
    if slope <= 0:
        return large * 2 if peaks[large] < limit else max(1, small // 2)
    return max(1, large + int((limit - peaks[large]) // slope))
