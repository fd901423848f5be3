"""The allocator at the moment it ran out of memory, from PyTorch's snapshot taken a little later.

Between the failure and the snapshot Python unwinds, and what operators held is freed. The trace has
these frees: undoing them, last first, gives back the moment of the failure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memopt.core.failure_place import Line, own_and_innermost
from lightning_memopt.core.memory_history import Snapshot

_ALIGNMENT = 512
_TOLERANCE = 0.01
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True)
class Block:
    """A piece of memory that a tensor has.

    Attributes:
        address: Where it begins.
        size: Its bytes, as the allocator rounds them.
        stack: The Python lines that asked for it, innermost first; empty where none were recorded.
    """

    address: int
    size: int
    stack: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class AllocatorState:
    """The allocator of one device at the moment of the failure.

    Attributes:
        blocks: What was allocated.
        reserved: Bytes that the allocator held of the device.
        requested: Bytes asked for, `None` if the failure isn't in the trace.
        free: Bytes that the device had free then, `None` likewise.
    """

    blocks: list[Block]
    reserved: int
    requested: int | None
    free: int | None

    @property
    def allocated(self) -> int:
        """Bytes of all blocks."""
        return sum(block.size for block in self.blocks)


def allocator_state(snapshot: Snapshot, index: int, requested: int | None) -> AllocatorState:
    """Return the state of a device at the moment of the last failure.

    Args:
        snapshot: PyTorch's snapshot.
        index: Index of the device.
        requested: Bytes that the error says were asked for; another failure isn't gone back to.
    """
    segments = [each for each in snapshot["segments"] if each.get("device", index) == index]
    live = {
        block["address"]: Block(block["address"], block["size"], block.get("frames", ()))
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    reserved = sum(segment["total_size"] for segment in segments)
    traces = snapshot["device_traces"]
    trace = traces[index] if index < len(traces) else []
    at = _last_failure(trace, requested)
    if at is None:
        return AllocatorState(list(live.values()), reserved, None, None)
    later = trace[at + 1 :]
    stacks = _stacks_of(trace[:at], {event.get("addr") for event in later})
    for event in reversed(later):
        action, address, size = event["action"], event.get("addr"), event["size"]
        if action == "alloc":
            live.pop(address, None)
        elif action == "free_requested":
            rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
            live[address] = Block(address, rounded, stacks.get(address, ()))
        reserved -= size * _RESERVES.get(action, 0)
    failure = trace[at]
    free = failure.get("device_free", failure.get("addr"))
    return AllocatorState(list(live.values()), reserved, failure["size"], free)


@dataclass(frozen=True)
class Allocations:
    """What one source line has asked for.

    Attributes:
        line: The innermost line that is neither PyTorch's nor Lightning's; `None` for what was
            allocated before the record began, or by a thread without Python, as backward's.
        kind: What it is used for, `""` if that isn't known.
        size: Bytes of the blocks.
        count: Number of blocks.
    """

    line: Line | None
    kind: str
    size: int
    count: int


def allocations_by_line(blocks: Iterable[Block], kinds: Mapping[int, str]) -> list[Allocations]:
    """Return what each source line has asked for, largest first.

    Args:
        blocks: The blocks.
        kinds: What blocks are used for, by address.
    """
    sizes: dict[tuple[Line | None, str], list[int]] = defaultdict(list)
    for block in blocks:
        sizes[line_of(block.stack), kinds.get(block.address, "")].append(block.size)
    rows = [Allocations(line, kind, sum(each), len(each)) for (line, kind), each in sizes.items()]
    return sorted(rows, key=lambda row: -row.size)


def line_of(stack: Sequence[Mapping[str, Any]]) -> Line | None:
    """Return the innermost line of a recorded stack that is neither PyTorch's nor Lightning's."""
    lines = (Line(frame["filename"], frame["line"], frame["name"]) for frame in stack)
    return own_and_innermost(lines)[1]


def _last_failure(trace: Sequence[Mapping[str, Any]], requested: int | None) -> int | None:
    for at in range(len(trace) - 1, -1, -1):
        if trace[at]["action"] == "oom":
            size = trace[at]["size"]
            is_same = requested is None or abs(size - requested) <= _TOLERANCE * max(size, 1)
            return at if is_same else None
    return None


def _stacks_of(
    trace: Sequence[Mapping[str, Any]], addresses: Collection[int | None]
) -> dict[int, Sequence[Mapping[str, Any]]]:
    """Return the stack that asked for each address last."""
    return {
        event["addr"]: event.get("frames", ())
        for event in trace
        if event["action"] == "alloc" and event.get("addr") in addresses
    }
