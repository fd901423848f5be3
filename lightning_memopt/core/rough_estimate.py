"""A rough figure for a step that can't be traced: small real batches on the CPU, or the weights."""

from __future__ import annotations

import copy
from contextlib import suppress

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lightning_memopt.core.anatomy import Anatomy, Part, read_anatomy
from lightning_memopt.core.failure_place import failure_place, first_line
from lightning_memopt.core.host_memory import usable_bytes
from lightning_memopt.core.random_state import RandomState
from lightning_memopt.core.run_memory import BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from lightning_memopt.core.traced_copy import Plan, trace_module
from lightning_memopt.core.training_step import without_metrics

SCALED = "activations and temporaries"
_SIZES = (2, 4)  # one sample is too few for BatchNorm
_COPIES = 8  # weights, gradients, Adam's state and as much again for a small batch
_OF_ADAM = 4


def rough_anatomy(plan: Plan, size: int | None, library_bytes: int) -> Anatomy:
    """Return an anatomy whose activations are extrapolated, or only what weights bring.

    Args:
        plan: The training.
        size: Samples of a micro-batch.
        library_bytes: Bytes of a library's workspace, of which there are two.
    """
    random_state = RandomState(torch.device("cpu"))
    with suppress(Exception):  # out of memory, no values on meta, whatever stopped the trace
        if size is not None and _has_room(plan.module):
            try:
                return _extrapolated(plan, size, 2 * library_bytes)
            finally:
                random_state.put_back()
    return _of_weights(plan.module)


def untraceable(error: Exception, module: nn.Module) -> str:
    """Return why a step of a module can't be traced, in one line."""
    place = failure_place(error, module)
    line = place.own or place.line
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = f"what runs depends on values, not on shapes alone ({error})"
    else:
        why = first_line(error)
    return why if line is None else f"{why}, at {line}"


def _extrapolated(plan: Plan, size: int, library_bytes: int) -> Anatomy:
    found = []
    for samples in _SIZES:
        module = copy.deepcopy(plan.module).cpu().train()
        with without_metrics(module):
            trace = trace_module(plan, module, plan.batch, samples, None)
        found.append(read_anatomy(trace, plan.on_cuda))
    small, large = found
    fixed = [part for part in large.parts if part.kind in (PARAMETERS, BUFFERS, OPTIMIZER_STATE)]
    slope = (large.peak - small.peak) / (_SIZES[1] - _SIZES[0])
    peak = int(large.peak + slope * (size - _SIZES[1])) + library_bytes
    rest = peak - sum(part.size for part in fixed)
    return Anatomy(peak, large.phase, (*fixed, Part(SCALED, "", rest)), (), None, False)


def _of_weights(module: nn.Module) -> Anatomy:
    """Return weights, gradients and the state of Adam: less than any step needs."""
    sizes = {(p.data_ptr(), id(p)): p.numel() * p.element_size() for p in module.parameters()}
    weights = sum(sizes.values())
    parts = (
        Part(PARAMETERS, "", weights),
        Part(GRADIENTS, "", weights),
        Part(OPTIMIZER_STATE, "", 2 * weights),
    )
    return Anatomy(_OF_ADAM * weights, "optimizer", parts, (), None, False)


def _has_room(module: nn.Module) -> bool:
    tensors = (*module.parameters(), *module.buffers())
    if any(tensor.is_meta for tensor in tensors):
        return False
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    usable = usable_bytes()
    return usable is None or _COPIES * weights < usable
