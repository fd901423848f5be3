"""The anatomy of a step as a picture of bars. It needs matplotlib, and leaves its state alone."""

from __future__ import annotations

from typing import Any

from lightning_memopt.core.anatomy import Anatomy
from lightning_memopt.core.units import format_bytes

_INCHES = 5.6
_ROW, _FRAME = 0.34, 1.1  # inches of a bar, and around all of them
_DPI = 125
_MAX_BARS = 8
_LEAST = 0.005  # of the peak, that a bar of its own shows
_COLOURS = {
    "parameters": "#4477AA",
    "frozen parameters": "#99BBDD",
    "optimizer state": "#66CCEE",
    "gradients": "#228833",
    "activations": "#EE8866",
    "batch": "#CCBB44",
}
_OTHER = "#BBBBBB"


def draw_anatomy(anatomy: Anatomy) -> Any:
    """Draw a bar for each use and type at the peak, largest first, with its size and share."""
    from matplotlib.figure import Figure

    rows = [(f"{x.kind} {x.dtype}".strip(), x.kind, x.size) for x in anatomy.parts]
    seen = sum(size >= _LEAST * anatomy.peak for *_, size in rows)
    if seen < len(rows) - 1 or len(rows) > _MAX_BARS:
        seen = min(seen, _MAX_BARS - 1)
        rest = rows[seen:]
        rows = [*rows[:seen], (f"{len(rest)} others", "", sum(size for *_, size in rest))]
    figure = Figure(figsize=(_INCHES, _FRAME + _ROW * len(rows)), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(rows))
    largest = max((size for *_, size in rows), default=1)
    axes.barh(
        positions,
        [size for *_, size in rows],
        color=[_COLOURS.get(kind, _OTHER) for _, kind, _ in rows],
        height=0.7,
    )
    axes.set_yticks(positions, [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, largest)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(f"peak {format_bytes(anatomy.peak)}, in {anatomy.phase}", fontsize=12)
    sizes = axes.twinx()  # whose labels make room for themselves
    sizes.set_ylim(axes.get_ylim())
    sizes.set_yticks(positions, [_size(size, anatomy.peak) for *_, size in rows])
    sizes.tick_params(length=0)
    sizes.spines[:].set_visible(False)
    return figure


def _size(size: int, peak: int) -> str:
    return f"{format_bytes(size)}  {size / (peak or 1) * 100:.0f} %"
