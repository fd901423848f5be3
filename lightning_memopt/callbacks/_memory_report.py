"""What `MemoryMonitor` writes: the point of a step, the shared charts, the table at the end."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from lightning_memopt.core.memory import MemoryReading
from lightning_memopt.core.step_memory import StepMemory, spread
from lightning_memopt.core.units import GIB, format_bytes

_PHASES = ("forward", "backward", "optimizer")
CURVES = {
    "memory": {
        "memory of a step": [
            f"memory/{name}_gib" for name in ("allocated", "reserved", "peak_allocated")
        ],
        "peak of a phase": [f"memory_phase/{phase}_peak_gib" for phase in _PHASES],
    }
}


def point_of_step(memory: StepMemory, peak: int) -> dict[str, float]:
    """Return the point of one step; what is unknown on this device is left out."""
    reading = memory.reading
    values = {
        "memory/allocated_gib": reading.allocated / GIB,
        "memory/reserved_gib": reading.reserved / GIB,
        "memory/peak_allocated_gib": peak / GIB,
        "memory/fragmentation": reading.fragmentation,
    }
    if reading.device_used is not None:
        values["memory/device_used_gib"] = reading.device_used / GIB
    if memory.alloc_retries is not None:
        values["memory/alloc_retries"] = float(memory.alloc_retries)
    return values


def point_of_ranks(peaks: list[float]) -> dict[str, float]:
    """Return the point that compares the peaks of all ranks."""
    ranks = spread(peaks)
    values = {f"memory_ranks/peak_{name}_gib": ranks[name] for name in ("min", "mean", "max")}
    return values | {"memory_ranks/peak_max_rank": ranks["max_rank"]}


def describe_plan(device: str, reading: MemoryReading, every_n_steps: int) -> str:
    """Return in a line what is read, and how often."""
    of_total = f" of {format_bytes(reading.device_total)}" if reading.device_total else ""
    steps = "step" if every_n_steps == 1 else f"{every_n_steps} steps"
    sampled = "; no peak is kept there, it is sampled" if reading.peak is None else ""
    return f"reading {device}{of_total}, a point every {steps}{sampled}"


def peak_table(summary: dict[str, Any]) -> Table:
    """Return where the run peaked, to print."""
    marked = " (interrupted: other code reset the counter)" if summary["peak_interrupted"] else ""
    retries = summary["alloc_retries"]
    retried = "" if retries is None else f"; {retries} allocator retries"
    table = Table(
        title=f"Memory of {summary['device']}: peak {format_bytes(summary['peak_bytes'])} in "
        f"{summary['peak_phase']}{marked}",
        caption=f"At the end {format_bytes(summary['reserved_bytes'])} reserved, "
        f"{format_bytes(summary['allocated_bytes'])} allocated, gap "
        f"{format_bytes(summary['gap_bytes'])}{retried}",
    )
    for heading in ("phase", "peak", "at step", "epoch"):
        table.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase, figures in summary["phases"].items():
        peak = format_bytes(figures["peak_bytes"])
        table.add_row(phase, peak, str(figures["step"]), str(figures["epoch"]))
    return table
