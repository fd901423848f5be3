"""What is written of a profiled step: tables and curves as text, and names that are free."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_memopt.core.kept_tensors import can_read_kept
from lightning_memopt.core.module_memory import ModuleMemory
from lightning_memopt.core.module_rows import ForwardMemory, ModuleRow
from lightning_memopt.core.profiled_step import PREFIX
from lightning_memopt.core.step_timeline import StepTimeline
from lightning_memopt.core.units import format_bytes

_MAX_OPERATORS = 100
TOO_OLD = "this PyTorch can't tell without changing results; a later one can"
UNSEEN = "no backward was seen; in manual optimization use `self.manual_backward(loss)`"


class ProfileFiles:
    """The files of one step, which never replace others.

    Args:
        folder: Where they go; it is made.
        step: Number of the step.
        rank: Number of the process.

    Attributes:
        written: All files that are whole.
        stem: What the name of each begins with.
    """

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.written: list[Path] = []
        self._folder = folder
        name = f"step{step}-rank{rank}"
        stems = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
        # A second profile of a step has all its files under one name that is free.
        taken = {path.name.rpartition("-")[0] for path in folder.iterdir()}
        self.stem = next(stem for stem in stems if stem not in taken)

    @property
    def names(self) -> str:
        """Where files were written and how they end, in one line."""
        endings = ", ".join(path.name.removeprefix(f"{self.stem}-") for path in self.written)
        return f"written to {self._folder / self.stem}-*: {endings}"

    @contextmanager
    def path(self, ending: str) -> Iterator[Path]:
        """Yield where the file with an ending goes; what fails to be written is removed."""
        path = self._folder / f"{self.stem}-{ending}"
        try:
            yield path
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.written.append(path)

    def write(self, ending: str, text: str) -> None:
        """Write a text."""
        with self.path(ending) as path:
            path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def operators_table(operators: Any, is_host: bool, limit: int = _MAX_OPERATORS) -> str:
    """Return the operators that a profiler saw, by the memory that each took itself.

    Args:
        operators: PyTorch's profiler, stopped. Its own table has no device memory where kernels
            were not recorded.
        is_host: Whether memory of the host counts, not that of a device.
        limit: The most rows.
    """
    where = "cpu" if is_host else "device"
    averages = [
        each
        for each in operators.key_averages()
        if each.device_type.name == "CPU" and not each.key.startswith(PREFIX)  # no kernel, no mark
    ]
    averages.sort(key=lambda each: -getattr(each, f"self_{where}_memory_usage"))
    titles = ("operator", "calls", "memory", "own", "own time on the host", "on the device")
    cells: list[tuple[str, ...]] = [titles]
    for each in averages[:limit]:
        sizes = (getattr(each, f"{kind}{where}_memory_usage") for kind in ("", "self_"))
        times = (each.self_cpu_time_total, each.self_device_time_total)
        milliseconds = (f"{time / 1000:.3f} ms" for time in times)
        cells.append((each.key, str(each.count), *map(format_bytes, sizes), *milliseconds))
    if is_host:
        cells = [row[:-1] for row in cells]
    heading = [
        "Operators, sorted by the memory that each took itself (own: without those that it calls).",
        "memory: allocated less freed while the operator ran, over all of its calls; below zero",
        "where it frees what others took.",
    ]
    left_out = max(0, len(averages) - limit)
    return "\n".join([*heading, "", *_aligned(cells, 1, left_out)])


def modules_table(modules: ModuleMemory, limit: int | None = None) -> str:
    """Return memory by module in the forward that kept most, by what each keeps itself.

    Args:
        modules: What was seen.
        limit: The most rows; `None` for all.
    """
    forward = modules.largest
    if forward is None:
        return "No module ran."
    rows = sorted(forward.rows, key=lambda row: (-row.own_kept_bytes, -row.kept_bytes))
    titles = ("module", "class", "calls", "forward", "own", "kept", "own")
    cells = [titles, *map(_cells, rows)]
    if not modules.has_growth:
        cells = [row[:3] + row[5:] for row in cells]
    left_out = 0 if limit is None else max(0, len(rows) - limit)
    lines = _aligned(cells[: len(cells) - left_out], 2, left_out)
    return "\n".join([*_heading(modules, forward), "", *lines, "", *_sums(modules, forward)])


def write_curve(timeline: StepTimeline, path: Path) -> None:
    """Write memory over the step as CSV: time, bytes by category, their total, reserved."""
    reserved = {"reserved_bytes": timeline.reserved} if timeline.reserved else {}
    columns = {f"{name.replace(' ', '_')}_bytes": x for name, x in timeline.bytes_of.items()}
    columns |= {"total_bytes": timeline.total} | reserved
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["time_ms", "phase", *columns])
        for position, time in enumerate(timeline.times_ms):
            values = [column[position] for column in columns.values()]
            writer.writerow([f"{time:.4f}", timeline.phase_at(time), *values])


def describe_peak(timeline: StepTimeline) -> str:
    """Return where a step peaked and what its memory was then, in one line."""
    peak = timeline.peak
    total = timeline.total[peak]
    phase = timeline.phase_at(timeline.times_ms[peak])
    parts = sorted(((x[peak], name) for name, x in timeline.bytes_of.items()), reverse=True)
    shares = ", ".join(
        f"{name} {format_bytes(size)} ({size / total:.0%})" for size, name in parts if size > 0
    )
    return f"peak {format_bytes(total)}{f' in {phase}' if phase else ''}: {shares}"


def _aligned(cells: Sequence[tuple[str, ...]], names: int, left_out: int) -> list[str]:
    """Return rows in columns, the first ones to the left and numbers to the right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return [*lines, *([f"... and {left_out} more"] if left_out else [])]


def _heading(modules: ModuleMemory, forward: ForwardMemory) -> list[str]:
    count = len(modules.forwards)
    which = "" if count == 1 else f", in forward {modules.forwards.index(forward) + 1} of {count}"
    lines = [
        f"Memory by module{which}, sorted by what a module itself keeps for backward.",
        "kept: storages that the backward of the loss needs, each counted once, for the innermost",
        "module that saved it first; own: without children. Parameters and buffers are left out. A",
        "checkpointed module keeps its inputs.",
    ]
    if modules.has_growth:
        lines += [
            "forward: growth of allocated memory while the module runs; its own is below zero",
            "where the module frees what its children took.",
        ]
    if not can_read_kept():
        lines += [f"What is kept is unknown: {TOO_OLD}."]
    elif not forward.has_backward:
        lines += [f"What is kept is unknown: {UNSEEN}."]
    return lines


def _cells(row: ModuleRow) -> tuple[str, ...]:
    sizes = (row.forward_bytes, row.own_forward_bytes, row.kept_bytes, row.own_kept_bytes)
    name = row.name or "(training_step)"
    return name, row.type_name, str(row.calls), *map(format_bytes, sizes)


def _sums(modules: ModuleMemory, forward: ForwardMemory) -> list[str]:
    own = sum(row.own_kept_bytes for row in forward.rows)
    kept, new = forward.kept_bytes, forward.kept_bytes - forward.kept_before_bytes
    lines = [
        f"distinct storages   {format_bytes(kept):>12}  ({kept} bytes)",
        f"  there before      {format_bytes(forward.kept_before_bytes):>12}  (the batch)",
        f"  new               {format_bytes(new):>12}",
    ]
    if own != kept:
        lines.append(f"but modules sum up to {format_bytes(own)} ({own} bytes): some are missing")
    if modules.has_growth:
        grown = forward.grown_bytes
        share = f" ({forward.explained:.1%} of it is kept and new)" if grown > 0 else ""
        lines.append(f"allocated grew by   {format_bytes(grown):>12}{share}")
    return lines
