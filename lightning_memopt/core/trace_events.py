"""The memory events of a trace of PyTorch's profiler, and the times of marks in it.

The trace has each allocation and each free with its address, on one clock with the marks that
`torch.profiler.record_function` makes.

Source: https://docs.pytorch.org/docs/stable/profiler.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The numbers that a trace gives to kinds of devices.
_DEVICE_TYPES = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13, "privateuseone": 20}


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation or a free.

    Attributes:
        time_us: When, on the trace's clock.
        address: Where the block begins.
        size: Bytes; below zero where they are freed.
        total: Bytes allocated on the device afterwards; `None` where the trace can't tell.
        reserved: Bytes reserved on the device afterwards.
    """

    time_us: float
    address: int
    size: int
    total: int | None = None
    reserved: int = 0


def read_events(trace: Mapping[str, Any], device_type: str, index: int | None) -> list[MemoryEvent]:
    """Return the allocations and frees on one device, in order, from a parsed Chrome trace."""
    is_host = device_type == "cpu"
    wanted = _DEVICE_TYPES.get(device_type)
    found = []
    for event in trace["traceEvents"]:
        if event.get("name") != "[memory]":
            continue
        args = event["args"]
        if args["Device Type"] != wanted or not (is_host or args["Device Id"] == (index or 0)):
            continue
        # The host's total knows nothing of what was allocated while nobody recorded.
        total, reserved = (
            (None, 0) if is_host else (args["Total Allocated"], args["Total Reserved"])
        )
        memory = MemoryEvent(event["ts"], args["Addr"], args["Bytes"], total, reserved)
        found.append((event["ts"], args.get("Ev Idx", 0), memory))
    return [memory for _, _, memory in sorted(found, key=lambda each: each[:2])]


def read_times(trace: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return when each mark whose name has a prefix was made, by the name without it."""
    return {
        event["name"].removeprefix(prefix): event["ts"]
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefix)
    }
