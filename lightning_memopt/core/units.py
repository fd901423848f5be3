"""Sizes of memory: parsing what a user writes, and writing what a user reads."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1024**2
GIB = 1024**3

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|(?:[kmgt]i?)?b)\s*", re.IGNORECASE)
_EXPECTED = 'bytes as an `int`, a size such as "20GiB" or a share such as "90%"'


@dataclass(frozen=True)
class Size:
    """An amount of memory, absolute or as a share of some total.

    Attributes:
        amount: Bytes, or the share as a fraction from 0 to 1 when `is_share`.
        is_share: Whether `amount` is a share.
    """

    amount: float
    is_share: bool

    def of(self, total: int) -> int:
        """Return the size in bytes, a share being taken of `total` bytes."""
        return int(self.amount * total) if self.is_share else int(self.amount)


def parse_size(value: int | str, argument: str = "size") -> Size:
    """Parse a size as users write it.

    Args:
        value: Bytes as an `int`, `"20GiB"` (binary) or `"20GB"` (decimal), or a share as `"90%"`.
        argument: Name of the argument, for the error.

    Returns:
        The size; a share still needs a total, see `Size.of`.

    Raises:
        TypeError: `value` is neither an `int` nor a `str`.
        ValueError: `value` is not positive, has no known unit, or is a share above 100 %.

    Example:
        >>> parse_size("1.5GiB").of(0)
        1610612736
        >>> parse_size("90%").of(1000)
        900
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"`{argument}` must be {_EXPECTED}, got {value!r}.")
    if isinstance(value, int):
        amount, unit = float(value), "B"
    else:
        match = _PATTERN.fullmatch(value)
        if match is None:
            raise ValueError(f"`{argument}` must be {_EXPECTED}, got {value!r}.")
        amount, unit = float(match[1]), match[2].upper()
    if amount <= 0:
        raise ValueError(f"`{argument}` must be above zero, got {value!r}.")
    if unit == "%":
        if amount > 100:
            raise ValueError(f"`{argument}` must be at most 100%, got {value!r}.")
        return Size(amount / 100, is_share=True)
    return Size(amount * _UNITS[unit], is_share=False)


def format_bytes(amount: float) -> str:
    """Write bytes for people, in the largest binary unit that keeps the number above one.

    Example:
        >>> format_bytes(1610612736)
        '1.50 GiB'
        >>> format_bytes(-2048)
        '-2.00 KiB'
        >>> format_bytes(12)
        '12 B'
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _UNITS[unit.upper()]
        if abs(amount) >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount:.0f} B"
