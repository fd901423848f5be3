"""All that can be found out about a run that has just run out of memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memopt.core.allocator_state import AllocatorState, allocator_state
from lightning_memopt.core.batches import tensors_of
from lightning_memopt.core.device_processes import processes_on
from lightning_memopt.core.failure_place import (
    MOVING,
    FailurePlace,
    failure_place,
    first_line,
    local_variable,
)
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.machine_facts import DeviceProcess
from lightning_memopt.core.memory import read_memory
from lightning_memopt.core.memory_history import Snapshot
from lightning_memopt.core.memory_limits import limit_bytes
from lightning_memopt.core.oom import out_of_memory_in, requested_bytes
from lightning_memopt.core.oom_diagnosis import Failure
from lightning_memopt.core.oom_rows import backward_place, holder_rows, largest_rows
from lightning_memopt.core.recent_steps import RecentSteps
from lightning_memopt.core.run_memory import PARAMETERS, RunMemory
from lightning_memopt.core.tensor_holders import Holding

_MAX_ERROR = 240
_NOWHERE = FailurePlace(None, None, None, None)
_Part = TypeVar("_Part")


@dataclass(frozen=True)
class Findings:
    """What was found out; sizes in bytes.

    Attributes:
        error: What the error says, shortened.
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
        missing: What could not be found out, and why.
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
    missing: list[str]


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
    requested = requested_bytes(error)
    parts = _Parts()
    place = parts.take("place", lambda: failure_place(exception, model), _NOWHERE)
    batch = parts.take("batch", lambda: local_variable(exception, "batch", _holds_tensors), None)
    if place.phase == MOVING and batch is not None:
        recent.begin_batch(batch, recent.kind)  # it didn't come as far as training
    index = device.index or 0
    state = parts.take(
        "allocator",
        lambda: None if snapshot is None else allocator_state(snapshot, index, requested),
        None,
    )
    memory = parts.take(
        "what holds memory", lambda: RunMemory(device, model, optimizers, batch), None
    )
    grown, rate = recent.growth()
    figures = _figures(device, state, requested, recent)
    settings |= {"grown": grown, "growth_rate": rate}
    held: dict[str, int] = {}
    if memory is not None:
        held = dict(memory.sizes)
        in_blocks, largest = parts.take("blocks", lambda: _in_blocks(model, memory), (0, 0))
        settings |= {
            "activations": memory.kept.total_bytes,
            "float32_activations": memory.float32_activations,
            "parameters": memory.sizes[PARAMETERS],
            "in_blocks": in_blocks,
            "largest_block": largest,
        }
    return Findings(
        error=textwrap.shorten(str(error), _MAX_ERROR, placeholder=" ...") or type(error).__name__,
        place=place,
        backward="" if memory is None else backward_place(memory, state),
        failure=Failure(phase=place.phase, **figures, **settings),
        held=held | {"other": max(0, figures["allocated"] - sum(held.values()))},
        activations=[] if memory is None else memory.kept.by_module(),
        largest=parts.take("largest allocations", lambda: largest_rows(state, memory), []),
        processes=parts.take("processes", lambda: processes_on(device), []),
        recent=recent,
        collections=parts.take(
            "who grows", lambda: holder_rows(find_holders()) if grown else [], []
        ),
        missing=parts.missing,
    )


class _Parts:
    """Takes the parts of a page one by one: one that fails doesn't take the others with it."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def take(self, name: str, find: Callable[[], _Part], default: _Part) -> _Part:
        try:
            return find()
        except Exception as error:
            self.missing.append(f"{name}: {first_line(error)}")
            return default


def _figures(
    device: torch.device, state: AllocatorState | None, requested: int | None, recent: RecentSteps
) -> dict[str, Any]:
    """Return the fields of `Failure` that are known without looking at tensors."""
    reading = read_memory(device)
    is_cpu = device.type == "cpu"
    # A process on a CPU is what is resident: what malloc holds beside it can't be told apart.
    allocated = reading.reserved if is_cpu else reading.allocated
    reserved, free = reading.reserved, None
    if state is not None:
        allocated, reserved, free = state.allocated, state.reserved, state.free
        requested = state.requested or requested
    total, used = reading.device_total, reading.device_used
    if free is None and total is not None and used is not None:
        free = total - used
    last = recent.steps[-1].allocated if recent.steps else allocated
    return {
        "requested": requested,
        "limit": limit_bytes(device),
        "total": total,
        "allocated": allocated,
        "reserved": reserved,
        "others": max(0, (total or 0) - reserved - (free or 0)),
        "free": free,
        "evaluated": max(0, allocated - last),
        "batch": recent.elements,
        "usual_batch": recent.usual_elements(),
        "largest_batch": recent.largest_elements(),
        "is_cpu": is_cpu,
    }


def _holds_tensors(value: Any) -> bool:
    try:
        return bool(tensors_of(value))
    except Exception:  # whatever it is, it isn't a batch that can be read
        return False


def _in_blocks(model: nn.Module, memory: RunMemory) -> tuple[int, int]:
    """Return the bytes kept within the blocks that checkpointing would choose, and the largest."""
    try:
        blocks = select_layers(model)
    except ValueError:  # it has none
        return 0, 0
    sizes = dict.fromkeys(blocks, 0)
    for kept in memory.kept.storages:
        names = kept.module.split(".")
        for depth in range(1, len(names) + 1):
            block = ".".join(names[:depth])
            if block in sizes:
                sizes[block] += kept.size
    return sum(sizes.values()), max(sizes.values(), default=0)
