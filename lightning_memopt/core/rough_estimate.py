"""A rough figure for a step that can't be traced: small real batches on the CPU, or the weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.parameter import is_lazy
from torch.optim import AdamW

from lightning_memopt.core.anatomy import FROZEN, UNTRACED, Anatomy, Part, read_anatomy
from lightning_memopt.core.failure_place import failure_place, first_line
from lightning_memopt.core.host_memory import usable_bytes
from lightning_memopt.core.random_state import RandomState
from lightning_memopt.core.run_memory import BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from lightning_memopt.core.traced_copy import Plan, trace_copy, trace_module
from lightning_memopt.core.training_step import without_metrics

SCALED = "activations and temporaries"
_SIZES = (2, 4)  # at first; one sample is too few for BatchNorm
_COPIES = 8  # weights, gradients, Adam's state and as much again for a small batch


def rough_anatomy(plan: Plan, size: int | None, library_bytes: int) -> Anatomy:
    """Return an anatomy whose activations are extrapolated, or only what weights bring.

    Args:
        plan: The training.
        size: Samples of a micro-batch.
        library_bytes: Bytes of a library's workspace, of which there are two.
    """
    libraries = 2 * library_bytes
    random_state = RandomState(torch.device("cpu"))
    with suppress(Exception):  # out of memory, no values on meta, whatever stopped the trace
        if size is not None and _has_room(plan.module):
            try:
                return _extrapolated(plan, size, libraries)
            finally:
                random_state.put_back()
    return _of_weights(plan, size, libraries)


def untraceable(error: Exception, module: nn.Module) -> str:
    """Return why a step of a module can't be traced, in one line."""
    place = failure_place(error, module)
    line = place.own or place.line
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = f"what runs depends on values, not on shapes alone ({error})"
    else:
        why = first_line(error)
    return why if line is None else f"{why}, at {line}"


def _extrapolated(plan: Plan, size: int, libraries: int) -> Anatomy:
    small, large = (_of_samples(plan, samples) for samples in _SIZES)
    samples, usable = _SIZES[1], usable_bytes()
    while (
        2 * samples <= size
        and large.peak - small.peak < large.peak / 4  # weights hide where samples peak
        and (usable is None or _COPIES * large.peak < usable)
    ):
        samples *= 2
        small, large = large, _of_samples(plan, samples)
    fixed = [part for part in large.parts if part.kind in (PARAMETERS, BUFFERS, OPTIMIZER_STATE)]
    slope = (large.peak - small.peak) / (samples / 2)
    peak = int(large.peak + slope * (size - samples)) + libraries
    rest = peak - sum(part.size for part in fixed)
    return _summed(large.phase, [*fixed, Part(SCALED, "", rest)])


def _of_samples(plan: Plan, samples: int) -> Anatomy:
    module = copy.deepcopy(plan.module).cpu().train()
    with without_metrics(module):
        trace = trace_module(plan, module, plan.batch, samples, None)
    return read_anatomy(trace, plan.on_cuda)


def _of_weights(plan: Plan, size: int | None, libraries: int) -> Anatomy:
    """Return what weights, gradients and the optimizer's state need: less than any step."""
    for each in (plan, replace(plan, optimizer=AdamW)):
        with suppress(Exception):  # `configure_optimizers` may need a Trainer
            found = read_anatomy(trace_copy(each, size, change=_without_forward), plan.on_cuda)
            return _summed(found.phase, [*found.parts, Part(UNTRACED, "", libraries)])
    # All is frozen, or the module forbids copies.
    weights = [p for p in plan.module.parameters() if not is_lazy(p)]
    trained = sum(p.nbytes for p in weights if p.requires_grad)
    frozen = sum(p.nbytes for p in weights if not p.requires_grad)
    parts = [
        Part(PARAMETERS, "", trained),
        Part(FROZEN, "", frozen),
        Part(GRADIENTS, "", trained),
        Part(OPTIMIZER_STATE, "", 2 * trained),
        Part(UNTRACED, "", libraries),
    ]
    return _summed("optimizer", parts)


def _summed(phase: str, parts: Sequence[Part]) -> Anatomy:
    """Return an anatomy whose peak is the sum of what is known of it."""
    found = sorted((part for part in parts if part.size), key=lambda part: -part.size)
    return Anatomy(sum(part.size for part in found), phase, tuple(found), (), None, False)


def _without_forward(module: Any) -> None:
    def training_step(*_: Any) -> Tensor:
        weights = [p for p in module.parameters() if p.requires_grad]
        return torch.stack([p.sum().float() for p in weights]).sum()

    module.training_step = training_step


def _has_room(module: nn.Module) -> bool:
    tensors = [
        tensor
        for tensor in (*module.parameters(), *module.buffers())
        if not is_lazy(tensor)  # whose size is known when the module has run
    ]
    if any(tensor.is_meta for tensor in tensors):
        return False
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    usable = usable_bytes()
    return usable is None or _COPIES * weights < usable
