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
_INCHES = (8.0, 4.5)
_DPI = 125
_AXES = (0.085, 0.125, 0.705, 0.74)  # left, bottom, width, height: a layout engine takes longer
_MAX_POINTS = 2000
_MAX_BLOCKS = 400
_NARROW = 0.07  # share of the width below which the name of a phase finds no room
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
    polygons = PolyCollection(
        [[(time, y / unit) for time, y in outline] for outline in _outlines(blocks)],
        facecolors=[_COLOURS[block.category] for block in _by_begin(blocks)],
        edgecolors="white",
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
        axes.text(
            0.995,
            -0.105,
            f"the {len(blocks)} largest of {len(timeline.blocks)} blocks",
            transform=axes.transAxes,
            ha="right",
            fontsize=9,
            color="#555555",
        )
    return figure


def draw_pixels(figure: Any) -> Any:
    """Return a figure's pixels: height, width and four channels, from 0 to 255."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

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
    axes.set_title(title, fontsize=13, pad=20)
    axes.set_xlabel("time on the host, ms", fontsize=11)
    axes.set_ylabel(f"allocated memory, {name}", fontsize=11)
    axes.set_xlim(0, timeline.end_ms or 1)
    axes.set_ylim(0, highest / unit * _HEADROOM)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    for phase, begin, end in timeline.phases:
        if begin > 0:
            axes.axvline(begin, color="#888888", linewidth=0.7, linestyle=":")
        if end - begin >= _NARROW * timeline.end_ms:
            axes.text(
                (begin + end) / 2,
                1.015,
                phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize=11,
                color="#333333",
            )
    return figure, axes, unit


def _legend(figure: Any, handles: list[Any], names: list[str]) -> None:
    where = (_AXES[0] + _AXES[2] + 0.005, _AXES[1] + _AXES[3])
    figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=where, fontsize=10, frameon=False
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
