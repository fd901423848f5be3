"""Tell what the memory of logged runs was, and what changed from one to another."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_memopt.commands._errors import CommandError
from lightning_memopt.commands._hyperparameters import (
    HyperparametersError,
    differing,
    read_hyperparameters,
)
from lightning_memopt.commands._run_figures import (
    Change,
    Figure,
    changes_between,
    figures_of,
    losses_of,
    training_curve,
)
from lightning_memopt.commands._run_pictures import can_draw, draw_runs, save_picture
from lightning_memopt.commands._run_tables import changes_table, hyperparameters_table, run_table
from lightning_memopt.commands._runs import Run, find_runs, read_runs
from lightning_memopt.core.timeline_pictures import has_pictures

_PNG = Path("memory-report.png")
_NO_MEMORY = "add `MemoryMonitor()` to the Trainer's callbacks to have its memory here"
_NO_MATPLOTLIB = 'no picture: `pip install "lightning-memopt[profiler]"` brings matplotlib'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "directories",
        nargs="+",
        type=Path,
        metavar="logs",
        help="a directory with TensorBoard logs anywhere under it; the first run found is what "
        "the others are compared with",
    )
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument(
        "--png",
        type=Path,
        default=_PNG,
        metavar="PATH",
        help="where to draw the curves, over what is there (default: %(default)s)",
    )
    pictures.add_argument("--no-png", action="store_true", help="draw nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def run(args: argparse.Namespace, console: Console) -> int:
    """Read the runs, draw and print them.

    Raises:
        CommandError: A directory has no runs, or the picture's directory can't be written to.
    """
    png: Path | None = None if args.no_png else args.png
    if png is not None:
        _check_writable(png)
    runs = find_runs(args.directories)
    read_runs(runs)
    warnings = [fault for run in runs for fault in run.faults]
    known = [run for run in runs if run.curves or not run.faults]
    hyperparameters = []
    for each in known:
        try:
            hyperparameters.append(read_hyperparameters(each.directory))
        except HyperparametersError as error:
            hyperparameters.append({})
            warnings.append(str(error))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if not known:
        raise CommandError("no event file there can be read")
    figures = [figures_of(each) for each in known]
    changes = [
        (
            changes_between(figures[0], figures[i]),
            changes_between(losses_of(known[0]), losses_of(known[i])),
            differing(hyperparameters[0], hyperparameters[i]),
        )
        for i in range(1, len(known))
    ]
    drawn, said = _draw(known, png)
    if args.json:
        document = {
            "runs": [_as_json(*pair) for pair in zip(known, figures, strict=True)],
            "changes": [
                _changes_as_json(known[0].name, each.name, *change)
                for each, change in zip(known[1:], changes, strict=True)
            ],
            "png": None if drawn is None else str(drawn),
            "warnings": warnings,
        }
        print(json.dumps(document, indent=2, allow_nan=False), file=console.file)
        return 0
    for each, own in zip(known, figures, strict=True):
        console.print(run_table(each, own))
        if not each.has_memory:
            _say(console, f"{each.name}: {_NO_MEMORY}\n")
    for each, (own_changes, losses, differences) in zip(known[1:], changes, strict=True):
        console.print(changes_table(known[0].name, each.name, own_changes, losses))
        if differences:
            console.print(hyperparameters_table(differences))
    if said:
        _say(console, said)
    return 0


def _draw(runs: Sequence[Run], png: Path | None) -> tuple[Path | None, str]:
    """Return where the curves were drawn, and what to say about it."""
    if png is None or not can_draw(runs):
        return None, ""
    if not has_pictures():
        return None, _NO_MATPLOTLIB
    try:
        save_picture(draw_runs(runs), png)
    except OSError as error:
        raise CommandError(f"can't write `{png}`: {error.strerror}") from error
    return png, f"curves: {png}"


def _check_writable(png: Path) -> None:
    hint = "give another `--png`, or `--no-png`"
    if png.is_dir():
        raise CommandError(f"`{png}` is a directory; {hint}")
    if not png.parent.is_dir():
        raise CommandError(f"there is no directory `{png.parent}` for the picture; {hint}")
    if not os.access(png if png.exists() else png.parent, os.W_OK):
        raise CommandError(f"can't write `{png}`; {hint}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _as_json(run: Run, figures: list[Figure]) -> dict[str, Any]:
    curve = training_curve(run)
    own: dict[str, Any] = {}
    for figure in figures:
        own[figure.key] = _finite(figure.value)
        if figure.at is not None:
            own[f"{figure.key.removesuffix('_bytes')}_{figure.axis}"] = figure.at
    return {
        "name": run.name,
        "directory": str(run.directory),
        "has_memory": run.has_memory,
        "first_step": None if curve is None else min(curve.steps),
        "last_step": None if curve is None else max(curve.steps),
        "points": 0 if curve is None else len(curve.steps),
        "figures": own,
        "losses": {x.key: {"value": _finite(x.value), "step": x.at} for x in losses_of(run)},
    }


def _changes_as_json(
    first: str,
    second: str,
    figures: list[Change],
    losses: list[Change],
    hyperparameters: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    def sides(changes: list[Change]) -> dict[str, dict[str, float | None]]:
        return {
            change.key: {
                "first": _finite(change.first),
                "second": _finite(change.second),
                "change": _finite(change.difference),
                "change_share": _finite(change.share),
            }
            for change in changes
        }

    return {
        "first": first,
        "second": second,
        "figures": sides(figures),
        "losses": sides(losses),
        "hyperparameters": {
            key: {side: _finite(value) for side, value in values.items()}
            for key, values in hyperparameters.items()
        },
    }


def _finite(value: Any) -> Any:
    """Return a value that JSON has: it knows neither infinity nor what is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
