"""What a report lists: bytes, each with what they are."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_memopt.core.allocator_state import AllocatorState, allocations_by_line, line_of
from lightning_memopt.core.run_memory import RunMemory
from lightning_memopt.core.tensor_holders import Holding

_LARGEST = 10
_MAX_COLLECTIONS = 5
# What is so much smaller than the largest isn't worth a line.
_LEAST_SHARE = 0.001


def backward_place(memory: RunMemory, state: AllocatorState | None) -> str:
    """Return the operation that backward had come to, its module and its line, or `""`."""
    position = memory.kept.position
    if position is None:
        return ""
    # Backward runs without Python's stack: the line is that of the forward.
    blocks = [] if state is None else state.blocks
    stacks = (block.stack for block in blocks if block.address in position.inputs)
    line = next((line for stack in stacks if (line := line_of(stack)) is not None), None)
    made = "" if line is None else f", whose inputs were made in {line}"
    return f"{position.operation} of `{position.module}`{made}"


def holder_rows(holders: Mapping[str, Holding]) -> list[tuple[int, str]]:
    """Return the attributes that hold several tensors, or graphs: bytes and words."""
    found = [(name, each) for name, each in holders.items() if each.tensors > 1 or each.with_graph]
    found.sort(key=lambda item: (item[1].graph_nodes > 0, item[1].bytes), reverse=True)
    return [
        (
            each.bytes,
            f"in `{name}`, {each.kind} of {each.tensors:,}, {each.with_graph:,} with a graph",
        )
        for name, each in found[:_MAX_COLLECTIONS]
    ]


def largest_rows(state: AllocatorState | None, memory: RunMemory | None) -> list[tuple[int, str]]:
    """Return the largest allocations by source line, or else the largest tensors by shape."""
    if state is not None and any(block.stack for block in state.blocks):
        rows = [
            (
                row.size,
                f"{row.count:,}{f', {row.kind},' if row.kind else ''} from "
                f"{row.line or 'before the record began, or backward'}",
            )
            for row in allocations_by_line(state.blocks, {} if memory is None else memory.kinds)
        ]
    else:
        rows = [
            (group.size, f"{group.count:,} of {list(group.shape)} {group.dtype}")
            for group in (() if memory is None else memory.tensors_by_shape())
        ]
    return [row for row in rows[:_LARGEST] if row[0] >= _LEAST_SHARE * rows[0][0]]
