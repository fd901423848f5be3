"""The picture of several runs' memory over their steps. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_memopt.commands._run_figures import PHASES
from lightning_memopt.commands._runs import Curve, Run
from lightning_memopt.core.units import GIB, MIB

_PANELS = {
    "memory/allocated_gib": "allocated at the end of the step",
    "memory/reserved_gib": "reserved at the end of the step",
    "memory/peak_allocated_gib": "peak of the step",
}
_PHASE_TAGS = {f"memory_phase/{phase}_peak_gib": phase for phase in PHASES}
_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#777777")
_STYLES: dict[str, Any] = dict(zip(PHASES, ("-", "--", ":"), strict=True))
_INCHES = (5.2, 3.1)  # of a panel
_WIDTH = 1.3
_FIRST_WIDTH = 2.2  # seen under another that is the same
_DPI = 150
_MAX_POINTS = 1000
_MAX_NAME = 48
_HEADROOM = 1.1


def can_draw(runs: Sequence[Run]) -> bool:
    """Return whether a run has a curve that is drawn."""
    return any(tag in run.curves for run in runs for tag in (*_PANELS, *_PHASE_TAGS))


def draw_runs(runs: Sequence[Run]) -> Any:
    """Draw a panel for each figure, with one line a run, and one for the peaks of phases."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs = [run for run in runs if can_draw([run])]
    panels = [(title, {tag: "-"}) for tag, title in _PANELS.items() if _has_tag(runs, tag)]
    phases = {tag: _STYLES[name] for tag, name in _PHASE_TAGS.items() if _has_tag(runs, tag)}
    if phases:
        panels.append(("peak of each phase", phases))
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    size = (_INCHES[0] * columns, _INCHES[1] * rows + 0.22 * len(runs))
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    colours = _colours(len(runs))
    for index, (title, tags) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_panel(axes, runs, tags, colours)
        axes.set_title(title, fontsize=11, loc="left")
    if phases:
        names = [_PHASE_TAGS[tag] for tag in phases]
        lines = [Line2D([], [], color="#444444", linestyle=_STYLES[name]) for name in names]
        axes.legend(  # beside the title, where it hides no line
            lines,
            names,
            loc="lower right",
            bbox_to_anchor=(1, 0.985),
            ncols=len(names),
            fontsize=9,
            frameon=False,
            columnspacing=1.0,
            handlelength=1.8,
        )
    figure.legend(
        [Line2D([], [], color=colour, linewidth=2) for colour in colours],
        [_short(run.name) for run in runs],
        loc="outside lower center",
        ncols=2 if len(runs) > 2 else 1,
        fontsize=10,
        frameon=False,
    )
    return figure


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure as PNG, over what is there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    with path.open("wb") as file:
        canvas.print_png(file)


def _draw_panel(axes: Any, runs: Sequence[Run], tags: dict[str, str], colours: list[Any]) -> None:
    curves = [
        (
            _thinned(run.curves[tag]),
            colour,
            style,
            _FIRST_WIDTH if run is runs[0] and len(runs) > 1 else _WIDTH,
        )
        for run, colour in zip(runs, colours, strict=True)
        for tag, style in tags.items()
        if tag in run.curves
    ]
    highest = max((value for (_, values), *_ in curves for value in values), default=0) * GIB
    unit, name = (
        (GIB, "GiB") if highest >= GIB else (MIB, "MiB") if highest >= MIB else (2**10, "KiB")
    )
    for (steps, values), colour, style, width in curves:
        marker = "o" if len(steps) == 1 else None  # a line of one point is none
        shown = [value * GIB / unit for value in values]
        axes.plot(steps, shown, style, color=colour, linewidth=width, marker=marker)
    axes.set_ylim(0, highest / unit * _HEADROOM or 1)
    axes.set_ylabel(name, fontsize=10)
    axes.set_xlabel("step", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _thinned(curve: Curve) -> tuple[list[int], list[float]]:
    """Return points that draw the same picture: of many, the highest of each piece."""
    count = len(curve.steps)
    width = -(-count // _MAX_POINTS) or 1
    kept = [
        max(range(start, min(start + width, count)), key=curve.values.__getitem__)
        for start in range(0, count, width)
    ]
    return [curve.steps[i] for i in kept], [curve.values[i] for i in kept]


def _colours(count: int) -> list[Any]:
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    from matplotlib import colormaps

    return [colormaps["turbo"](0.05 + 0.9 * i / (count - 1)) for i in range(count)]


def _has_tag(runs: Sequence[Run], tag: str) -> bool:
    return any(tag in run.curves for run in runs)


def _short(name: str) -> str:
    # A name that begins with an underscore would be left out of the legend by matplotlib.
    name = name if len(name) <= _MAX_NAME else f"…{name[1 - _MAX_NAME :]}"
    return f" {name}" if name.startswith("_") else name.replace("$", r"\$")
