"""When to give cached memory back, from numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_CALLS = 5
_MAX_SHARE_OF_TIME = 0.03


@dataclass(frozen=True)
class FragmentationRule:
    """Give memory back when much of what is reserved is not allocated.

    Attributes:
        above: Share of reserved that must be free, from 0 to 1.
        min_gap: Bytes of reserved that must be free.
        every: Steps that must lie between two calls.
    """

    above: float
    min_gap: int
    every: int

    def is_met(self, allocated: int, reserved: int, steps_since_last: int | None) -> bool:
        """Return whether to call now.

        Args:
            allocated: Bytes in use.
            reserved: Bytes held.
            steps_since_last: Steps since the last call, `None` if there was none.
        """
        gap = reserved - allocated
        rested = steps_since_last is None or steps_since_last >= self.every
        return rested and gap > self.above * reserved and gap > self.min_gap


def complaint(calls: int, seconds: float, freed: int, elapsed_seconds: float) -> str | None:
    """Say what is wrong with the calls so far, or `None`.

    Args:
        calls: Calls so far.
        seconds: Time they took together.
        freed: Bytes they gave back together.
        elapsed_seconds: Time since training began.

    Returns:
        Half a sentence, or `None` while there are too few calls to tell or all is well.
    """
    if calls < _MIN_CALLS:
        return None
    if freed <= 0:
        return f"{calls} calls gave nothing back"
    share = seconds / elapsed_seconds
    if share > _MAX_SHARE_OF_TIME:
        return f"{calls} calls took {share:.1%} of the time of training"
    return None
