"""Pictures of a step's memory. They need matplotlib, and leave its global state alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_memopt.core.step_timeline import CATEGORIES, Block, StepTimeline
from lightning_memopt.core.units import GIB, MIB, format_bytes

_COLOURS = {
    "parameters": "#4477AA",
    "optimizer state": "#66CCEE",
    "gradients": "#228833",
    "activations": "#EE8866",
    "other": "#BBBBBB",
}
_REST = "#E8E8E8"  # what lies on top of the blocks that are drawn
_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", 1024))
_INCHES = (5.6, 4.2)
_DPI = 200
# TensorBoard shows pictures 350 pixels wide and takes every second pixel of this one.
BOARD_DPI = 125
_AXES = (0.125, 0.285, 0.845, 0.595)  # left, bottom, width, height: a layout engine takes longer
_MAX_POINTS = 2000
_MAX_BLOCKS = 400
_THICK = 0.01  # share of an axis from which on a block has a white edge
_LETTER = 0.0175  # width of a letter of a phase's name, as a share of that of the axes
_MARGIN = 0.03  # what is left beside the axes
_HEADROOM = 1.18


def has_pictures() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_categories(timeline: StepTimeline, title: str) -> Any:
    """Draw the stacked curve of what memory is used for, with the phases of the step."""
    figure, axes, unit = _frame(timeline, title)
    shown = _thinned(timeline)
    times = [*(timeline.times_ms[i] for i in shown), timeline.end_ms]
    rows = [[values[i] / unit for i in (*shown, -1)] for values in timeline.bytes_of.values()]
    colours = [_COLOURS[name] for name in timeline.bytes_of]
    labels = list(timeline.bytes_of)
    axes.stackplot(times, rows, labels=labels, colors=colours, step="post", linewidth=0)
    peak = timeline.peak
    highest = timeline.total[peak]
    axes.axhline(highest / unit, color="#444444", linewidth=1, linestyle="--")
    axes.plot(timeline.times_ms[peak], highest / unit, "o", color="black", markersize=5)
    is_right = timeline.times_ms[peak] > timeline.end_ms / 2
    axes.annotate(
        f"peak {format_bytes(highest)}",
        (timeline.times_ms[peak], highest / unit),
        xytext=(-6 if is_right else 6, 5),
        textcoords="offset points",
        ha="right" if is_right else "left",
        fontsize=11,
        fontweight="bold",
    )
    handles, names = axes.get_legend_handles_labels()
    _legend(figure, handles[::-1], names[::-1])  # in the order of the picture, top first
    return figure


def draw_blocks(timeline: StepTimeline, title: str) -> Any:
    """Draw the allocator's timeline: each block from its allocation to its free, stacked."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    figure, axes, unit = _frame(timeline, title)
    blocks = sorted(timeline.blocks, key=lambda block: -block.size)[:_MAX_BLOCKS]
    ordered = _by_begin(blocks)
    colours = [_COLOURS[block.category] for block in ordered]
    # White around a thin block would hide it, and look like memory that nobody has.
    thick = axes.get_ylim()[1] * unit * _THICK, (timeline.end_ms or 1) * _THICK
    edges = [
        "white" if x.size > thick[0] and x.end_ms - x.begin_ms > thick[1] else colour
        for x, colour in zip(ordered, colours, strict=True)
    ]
    polygons = PolyCollection(
        [[(time, y / unit) for time, y in outline] for outline in _outlines(blocks)],
        facecolors=colours,
        edgecolors=edges,
        linewidths=0.4,
    )
    axes.add_collection(polygons)
    polygons.set_zorder(2)
    shown = _thinned(timeline)
    times = [*(timeline.times_ms[i] for i in shown), timeline.end_ms]
    allocated = [timeline.total[i] / unit for i in (*shown, -1)]
    axes.fill_between(times, allocated, color=_REST, step="post", linewidth=0)
    used = {block.category for block in blocks}
    handles: list[Any] = [
        Patch(color=_COLOURS[name], label=name) for name in reversed(CATEGORIES) if name in used
    ]
    handles.insert(0, Patch(color=_REST, label="the rest"))
    lines = [("allocated", timeline.total, "-"), ("reserved", timeline.reserved, ":")]
    for name, values, style in lines:
        if values:
            curve = [values[i] / unit for i in (*shown, -1)]
            handles += axes.plot(
                times, curve, style, color="black", linewidth=1, drawstyle="steps-post", label=name
            )
    _legend(figure, handles, [handle.get_label() for handle in handles])
    if len(timeline.blocks) > len(blocks):
        count = f"the {len(blocks)} largest of {len(timeline.blocks)} blocks"
        axes.set_xlabel(f"{axes.get_xlabel()}; {count}", fontsize=11)
    return figure


def draw_pixels(figure: Any, dpi: int = _DPI) -> Any:
    """Return a figure's pixels: height, width and four channels, from 0 to 255.

    Args:
        figure: The figure.
        dpi: Pixels for an inch; the figure is 5.6 inches wide.
    """
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(dpi)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba()).copy()


def save_pixels(pixels: Any, path: Path) -> None:
    """Write pixels as PNG."""
    from matplotlib.image import imsave

    imsave(path, pixels, format="png", dpi=_DPI)


def _frame(timeline: StepTimeline, title: str) -> tuple[Any, Any, int]:
    """Return a figure with its axes, title and phases, and the unit of its bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI)
    axes = figure.add_axes(_AXES)
    highest = max([*timeline.total, *timeline.reserved, 1])
    unit, name = (
        (GIB, "GiB") if highest >= GIB else (MIB, "MiB") if highest >= MIB else (2**10, "KiB")
    )
    axes.set_title(title, fontsize=12, pad=19)
    axes.set_xlabel("time on the host, ms", fontsize=11)
    axes.set_ylabel(f"allocated memory, {name}", fontsize=11)
    axes.set_xlim(0, timeline.end_ms or 1)
    axes.set_ylim(0, highest / unit * _HEADROOM)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    for _, begin, _ in timeline.phases:
        if begin > 0:
            axes.axvline(begin, color="#888888", linewidth=0.7, linestyle=":")
    for phase, middle in _phase_names(timeline):
        where = axes.transAxes
        axes.text(middle, 1.015, phase, transform=where, ha="center", fontsize=11, color="#333333")
    return figure, axes, unit


def _phase_names(timeline: StepTimeline) -> list[tuple[str, float]]:
    """Return names of phases and the middle of each, as a share; the longest phases come first.

    What finds no room beside those has no name.
    """
    placed: list[tuple[str, float]] = []
    for phase, begin, end in sorted(timeline.phases, key=lambda each: each[1] - each[2]):
        half = _LETTER * len(phase) / 2
        middle = (begin + end) / 2 / (timeline.end_ms or 1)
        middle = min(max(middle, half), 1 + _MARGIN - half)
        if all(abs(middle - x) >= half + _LETTER * len(other) / 2 for other, x in placed):
            placed.append((phase, middle))
    return placed


def _legend(figure: Any, handles: list[Any], names: list[str]) -> None:
    figure.legend(
        handles,
        names,
        loc="lower center",
        ncols=3,
        fontsize=11,
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.2,
        labelspacing=0.25,
    )


def _thinned(timeline: StepTimeline) -> list[int]:
    """Return positions that draw the same picture: of many, the highest of each narrow piece."""
    count = len(timeline.times_ms)
    if count <= _MAX_POINTS:
        return list(range(count))
    width = timeline.end_ms / _MAX_POINTS or 1.0
    highest: dict[int, int] = {}
    for position, time in enumerate(timeline.times_ms):
        piece = int(time / width)
        if piece not in highest or timeline.total[position] > timeline.total[highest[piece]]:
            highest[piece] = position
    return sorted(highest.values())


def _by_begin(blocks: list[Block]) -> list[Block]:
    return sorted(blocks, key=lambda block: (block.begin_ms, CATEGORIES.index(block.category)))


def _outlines(blocks: list[Block]) -> Iterator[list[tuple[float, float]]]:
    """Yield the outline of each block: a block falls when one below it is freed."""
    ordered = _by_begin(blocks)
    # Of those that end together, the upper ones first: then nothing falls.
    ends = sorted(range(len(ordered)), key=lambda i: (ordered[i].end_ms, -i))
    paths: dict[int, list[tuple[float, float]]] = {}
    live: list[int] = []
    top = 0.0

    def free_until(time: float) -> None:
        nonlocal top
        while ends and ends[0] in paths and ordered[ends[0]].end_ms <= time:
            freed = ends.pop(0)
            size, now = ordered[freed].size, ordered[freed].end_ms
            position = live.index(freed)
            paths[freed].append((now, paths[freed][-1][1]))
            for above in live[position + 1 :]:
                y = paths[above][-1][1]
                paths[above] += [(now, y), (now, y - size)]
            del live[position]
            top -= size

    for index, block in enumerate(ordered):
        free_until(block.begin_ms)
        paths[index] = [(block.begin_ms, top)]
        live.append(index)
        top += block.size
    free_until(float("inf"))
    for index, block in enumerate(ordered):
        lower = paths[index]
        yield [*lower, *((time, y + block.size) for time, y in reversed(lower))]
