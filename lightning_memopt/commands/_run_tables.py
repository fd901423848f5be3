"""What `report` prints: a table for each run, and one for what changed between two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_memopt.commands._run_figures import (
    Change,
    Figure,
    Kind,
    format_figure,
    losses_of,
    training_curve,
)
from lightning_memopt.commands._runs import Run

_MAX_VALUE = 60


def run_table(run: Run, figures: Sequence[Figure]) -> Group:
    """Return the figures of a run, then its losses, each with the place where it was."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("figure", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)
    for group in (figures, losses_of(run)):
        for figure in group:
            at = "" if figure.at is None else f"{figure.axis} {figure.at:,}"
            value = format_figure(figure.value, figure.kind)
            table.add_row(Text(figure.label), value, at, end_section=figure is group[-1])
    return Group(_heading(run.name, _length(run)), *([table] if table.row_count else []))


def changes_table(first: str, second: str, *groups: Sequence[Change]) -> Group:
    """Return groups of figures of two runs beside each other."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("figure", overflow="fold")
    for heading in ("first", "second", "change", "%"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in groups:
        for change in group:
            share = change.share if change.difference else None
            table.add_row(
                Text(change.label),
                format_figure(change.first, change.kind),
                format_figure(change.second, change.kind),
                _signed(change.difference, change.kind),
                "" if share is None else f"{share * 100:+,.1f}",
                end_section=change is group[-1],
            )
    return Group(_heading("what changed", f"from {first} to {second}"), table)


def hyperparameters_table(differences: dict[str, dict[str, Any]]) -> Group:
    """Return the hyper-parameters that differ."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("key", "first", "second"):
        table.add_column(heading, overflow="fold")
    for key, values in differences.items():
        shown = [_value(values[side]) if side in values else "-" for side in ("first", "second")]
        table.add_row(Text(key), *(Text(value) for value in shown))
    return Group(_heading("hyper-parameters that differ"), table)


def _heading(name: str, about: str = "") -> Text:
    return Text(overflow="fold").append(name, style="bold").append(f"  {about}" if about else "")


def _length(run: Run) -> str:
    curve = training_curve(run)
    if curve is None:
        return "no points"
    first, last, points = min(curve.steps), max(curve.steps), len(curve.steps)
    logged = "" if points == last - first + 1 else f", {points:,} points"
    return f"steps {first:,} to {last:,}{logged}"


def _signed(difference: float | None, kind: Kind) -> str:
    if difference is None:
        return ""
    if not difference:
        return "same"
    return f"{'+' if difference > 0 else ''}{format_figure(difference, kind)}"


def _value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
