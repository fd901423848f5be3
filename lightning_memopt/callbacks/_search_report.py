"""What a search for a micro-batch tried and found, in words, as a table and as a curve."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_memopt.callbacks._lightning import PointWriter
from lightning_memopt.core.micro_batch_search import MicroBatchSearch, Trial
from lightning_memopt.core.units import GIB, format_bytes


@dataclass(frozen=True)
class Found:
    """What a search found; both are `None` where no size can be tried.

    Attributes:
        largest: The largest number of samples that fits on every rank.
        chosen: The number of samples to train with.
    """

    largest: int | None
    chosen: int | None


def report(
    search: MicroBatchSearch, found: Found, usable: int | None, prints: bool, writer: PointWriter
) -> None:
    """Write the curve of the trials, x being the number of samples, and print their table.

    Args:
        search: What was tried.
        found: What all ranks agreed on.
        usable: Bytes that this process may use.
        prints: Whether to print.
        writer: Takes the curve.
    """
    trials = sorted(search.trials, key=lambda trial: trial.size)
    for trial in trials:
        values = {}
        if trial.peak is not None:
            values["accumulation/search_peak_gib"] = trial.peak / GIB
        if trial.seconds:
            values["accumulation/search_samples_per_s"] = trial.size / trial.seconds
        if values:
            writer.add(values, trial.size)
    if prints:
        within = "" if search.limit is None else f", limit {format_bytes(search.limit)}"
        within += "" if usable is None else f" of {format_bytes(usable)} usable"
        table = Table("samples", "peak", "samples/s", "", title="Micro-batches" + within)
        for trial in trials:
            table.add_row(*_row(trial, found))
        Console().print(table)


def why_nothing_fits(search: MicroBatchSearch, error: str, usable: int | None) -> str:
    """Say what the smallest size tried would have needed, and what there is."""
    smallest = min(search.trials, key=lambda trial: trial.size)
    if smallest.peak is not None and search.limit is not None:
        peak, limit = format_bytes(smallest.peak), format_bytes(search.limit)
        error = f"needs {peak} where `memory` allows {limit}"
    else:
        error = f"runs out of memory {error}"
    there = "" if usable is None else f" ({format_bytes(usable)} is what this process may use)"
    return f"Not even one sample fits: the smallest size tried, {smallest.size}, {error}{there}."


def _row(trial: Trial, found: Found) -> tuple[str, str, str, str]:
    peak = "?" if trial.peak is None else format_bytes(trial.peak)
    speed = f"{trial.size / trial.seconds:.1f}" if trial.seconds else "-"
    sizes = {"largest": found.largest, "chosen": found.chosen}
    verdict = ", ".join(name for name, size in sizes.items() if size == trial.size)
    if not trial.fits:
        verdict = "too large" if trial.seconds else "out of memory"
    return str(trial.size), peak, speed, verdict
