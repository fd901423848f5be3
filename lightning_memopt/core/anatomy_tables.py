"""The anatomy of a step as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_memopt.core.anatomy import Anatomy
from lightning_memopt.core.model_advice import Advice
from lightning_memopt.core.units import format_bytes

_LEAST = 0.0005  # share of the peak that has a row of its own
_MAX_ROWS = 6  # of what is kept, by module, operator and type; the rest is summed


def anatomy_tables(anatomy: Anatomy) -> Group:
    """Return a table of what is there at the peak, and one of what forward keeps for backward."""
    how = "measured" if anatomy.is_measured else "computed"
    heading = _heading(f"peak {format_bytes(anatomy.peak)}", f"{how}, in {anatomy.phase}")
    if not anatomy.kept:
        return Group(heading, peak_table(anatomy))
    kept = _heading(
        f"kept for backward {format_bytes(anatomy.kept_bytes)}", "at the end of forward"
    )
    return Group(heading, peak_table(anatomy), kept, kept_table(anatomy))


def peak_table(anatomy: Anatomy) -> Table:
    """Return what the bytes at the peak are used for."""
    table = _table("at the peak", "type")
    least = anatomy.peak * _LEAST
    small = [part.size for part in anatomy.parts if part.size < least]
    for part in anatomy.parts[: -len(small) or None]:  # they are sorted
        _add(table, part.size, anatomy.peak, part.kind, part.dtype)
    if small:
        _add(table, sum(small), anatomy.peak, f"{len(small)} smaller", "")
    return table


def kept_table(anatomy: Anatomy) -> Table:
    """Return what forward keeps for backward, by module, operator and type."""
    table = _table("by", "name")
    total = anatomy.kept_bytes
    for what in ("module", "operator", "dtype"):
        rows = _with_rest(anatomy.kept_by(what))
        for number, (name, size) in enumerate(rows):
            label = name or "(outside of modules)"
            by = "type" if what == "dtype" else what
            _add(table, size, total, by if number == 0 else "", label)
        table.add_section()
    return table


def advice_table(advice: Sequence[Advice], peak: int) -> Group:
    """Return what would save most of a peak, with its price."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("change", "saves", "share", "price"):
        is_figure = name in ("saves", "share")
        side: Literal["left", "right"] = "right" if is_figure else "left"
        table.add_column(name, justify=side, no_wrap=is_figure, overflow="fold")
    for each in advice:
        what = Text(each.what).append(f"\n{each.how}", style="dim")
        share = f"{each.saved / peak * 100:.0f} %"
        table.add_row(what, format_bytes(each.saved), share, Text(each.price))
    return Group(_heading("what would save most", "each by itself, traced in the same way"), table)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    for name in ("size", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(table: Table, size: int, total: int, *names: str) -> None:
    share = f"{size / total * 100:.1f} %" if total else ""
    table.add_row(*map(Text, names), format_bytes(size), share)


def _heading(name: str, about: str) -> Text:
    return Text(overflow="fold").append(name, style="bold").append(f"  {about}")


def _with_rest(rows: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    shown, rest = list(rows[:_MAX_ROWS]), rows[_MAX_ROWS:]
    if rest:
        shown.append((f"{len(rest)} others", sum(size for _, size in rest)))
    return shown
