"""All that can be found out about a run that has just run out of memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.core.allocator_state import (
    AllocatorState,
    allocations_by_line,
    allocator_state,
    line_of,
)
from lightning_memopt.core.device_processes import DeviceProcess, processes_on
from lightning_memopt.core.failure_place import FailurePlace, failure_place, local_variable
from lightning_memopt.core.growth import find_growth
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.memory import read_memory
from lightning_memopt.core.memory_history import Snapshot
from lightning_memopt.core.memory_limits import limit_bytes
from lightning_memopt.core.oom import out_of_memory_in, requested_bytes
from lightning_memopt.core.oom_diagnosis import Failure
from lightning_memopt.core.recent_steps import RecentSteps
from lightning_memopt.core.run_memory import RunMemory
from lightning_memopt.core.tensor_holders import Holding

_LARGEST = 10
_MAX_ERROR = 240
_MAX_COLLECTIONS = 5
# What is so much smaller than the largest isn't worth a line.
_LEAST_SHARE = 0.001


@dataclass(frozen=True)
class Findings:
    """What was found out; sizes in bytes.

    Attributes:
        error: What the error says, its first sentence.
        place: Where it was raised.
        backward: The operation and the module that backward had come to, `""` if unknown.
        failure: The figures that decide.
        held: What holds the memory: bytes by kind, `"other"` the rest of what is allocated.
        activations: Bytes kept for backward by module, largest first.
        largest: The largest live allocations, each with its source line or its shape.
        processes: The processes on the device.
        recent: The last steps.
        collections: If memory grew, the attributes that hold many tensors: bytes and description,
            what holds graphs first.
    """

    error: str
    place: FailurePlace
    backward: str
    failure: Failure
    held: dict[str, int]
    activations: list[tuple[str, int]]
    largest: list[tuple[int, str]]
    processes: list[DeviceProcess]
    recent: RecentSteps
    collections: list[tuple[int, str]]


def find_out(
    exception: BaseException,
    device: torch.device,
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    recent: RecentSteps,
    snapshot: Snapshot | None,
    find_holders: Callable[[], Mapping[str, Holding]],
    **settings: Any,
) -> Findings:
    """Look at a run that has just failed, while its tensors are still there.

    Its graphs are of no use afterwards.

    Args:
        exception: The error, with its traceback.
        device: The device that training runs on.
        model: The model.
        optimizers: Its optimizers.
        recent: The last steps.
        snapshot: PyTorch's record of allocations, if there is one.
        find_holders: Looks for the attributes that hold tensors; called if memory grew.
        settings: More fields of `Failure`.
    """
    error = out_of_memory_in(exception) or exception
    place = failure_place(exception, model)
    state = _state(device, snapshot, requested_bytes(error))
    memory = RunMemory(device, model, optimizers, local_variable(exception, "batch"))
    in_blocks, largest_block = _in_blocks(model, memory)
    reading = read_memory(device)
    is_cpu = device.type == "cpu"
    # A process on a CPU is what is resident: what malloc holds beside it can't be told apart.
    allocated = reading.reserved if is_cpu else reading.allocated
    reserved, requested, free = reading.reserved, requested_bytes(error), None
    if state is not None:
        allocated, reserved, free = state.allocated, state.reserved, state.free
        requested = state.requested or requested
    total, used = reading.device_total, reading.device_used
    if free is None and total is not None and used is not None:
        free = total - used
    growth = find_growth((record.step, record.allocated) for record in recent.steps)
    last = recent.steps[-1].allocated if recent.steps else allocated
    failure = Failure(
        phase=place.phase,
        requested=requested,
        limit=limit_bytes(device),
        total=total,
        allocated=allocated,
        reserved=reserved,
        others=max(0, (total or 0) - reserved - (free or 0)),
        free=free,
        activations=memory.kept.total_bytes,
        float32_activations=memory.float32_activations,
        in_blocks=in_blocks,
        largest_block=largest_block,
        parameters=memory.sizes["parameters"],
        evaluated=max(0, allocated - last),
        batch=recent.elements,
        usual_batch=recent.usual_elements(),
        largest_batch=recent.largest_elements(),
        grown=0 if growth is None else growth.grown_bytes,
        growth_rate=0.0 if growth is None else growth.bytes_per_step,
        is_cpu=is_cpu,
        **settings,
    )
    return Findings(
        error=textwrap.shorten(str(error), _MAX_ERROR, placeholder=" ...") or type(error).__name__,
        place=place,
        backward=_backward(memory, state),
        failure=failure,
        held=memory.sizes | {"other": max(0, allocated - sum(memory.sizes.values()))},
        activations=memory.kept.by_module(),
        largest=_largest(state, memory),
        processes=processes_on(device),
        recent=recent,
        collections=[] if growth is None else _collections(find_holders()),
    )


def _backward(memory: RunMemory, state: AllocatorState | None) -> str:
    position = memory.kept.position
    if position is None:
        return ""
    # Backward runs without Python's stack: the line is that of the forward.
    blocks = [] if state is None else state.blocks
    stacks = (block.stack for block in blocks if block.address in position.inputs)
    line = next((line for stack in stacks if (line := line_of(stack)) is not None), None)
    made = "" if line is None else f", whose inputs were made in {line}"
    return f"{position.operation} of `{position.module}`{made}"


def _collections(holders: Mapping[str, Holding]) -> list[tuple[int, str]]:
    found = [(name, each) for name, each in holders.items() if each.tensors > 1 or each.with_graph]
    found.sort(key=lambda item: (item[1].graph_nodes > 0, item[1].bytes), reverse=True)
    return [
        (
            each.bytes,
            f"in `{name}`, {each.kind} of {each.tensors:,}, {each.with_graph:,} with a graph",
        )
        for name, each in found[:_MAX_COLLECTIONS]
    ]


def _state(
    device: torch.device, snapshot: Snapshot | None, requested: int | None
) -> AllocatorState | None:
    return None if snapshot is None else allocator_state(snapshot, device.index or 0, requested)


def _in_blocks(model: nn.Module, memory: RunMemory) -> tuple[int, int]:
    """Return the bytes kept within the blocks that checkpointing would choose, and the largest."""
    try:
        blocks = select_layers(model)
    except ValueError:  # it has none
        return 0, 0
    sizes = dict.fromkeys(blocks, 0)
    for kept in memory.kept.storages:
        for block in blocks:
            if f"{kept.module}.".startswith(f"{block}."):
                sizes[block] += kept.size
    return sum(sizes.values()), max(sizes.values(), default=0)


def _largest(state: AllocatorState | None, memory: RunMemory) -> list[tuple[int, str]]:
    if state is not None and any(block.stack for block in state.blocks):
        rows = [
            (
                row.size,
                f"{row.count:,}{f', {row.kind},' if row.kind else ''} from "
                f"{row.line or 'before the record began, or backward'}",
            )
            for row in allocations_by_line(state.blocks, memory.kinds)
        ]
    else:
        rows = [
            (group.size, f"{group.count:,} of {list(group.shape)} {group.dtype}")
            for group in memory.tensors_by_shape()
        ]
    return [row for row in rows[:_LARGEST] if row[0] >= _LEAST_SHARE * rows[0][0]]
