"""Training steps under a trace, and the anatomy of a real one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.core.anatomy import Anatomy, read_anatomy
from lightning_memopt.core.batches import tensors_of
from lightning_memopt.core.checks import check_word
from lightning_memopt.core.memory_trace import MemoryTrace
from lightning_memopt.core.preserved_training import preserved
from lightning_memopt.core.run_memory import BATCH, GRADIENTS, OPTIMIZER_STATE, tensors_by_kind
from lightning_memopt.core.training_step import PRECISIONS, precision_context, run_step

_STEPS = 2  # only the second has the optimizer's state, and gradients that forward finds


def anatomy(
    model: nn.Module, optimizer: Optimizer, batch: Any, precision: str = "32-true"
) -> Anatomy:
    """Return where the bytes of a training step are, from two real steps that leave no trace.

    You gain a table of the peak: parameters, gradients, optimizer state, buffers, the batch,
    activations by module, operator and type, temporaries, what the allocator rounds up and what
    libraries take. You pay two steps that run slower, and a copy of the model and its optimizer's
    state in host memory. Everything is put back: weights, state, buffers, gradients, random
    numbers.

    Args:
        model: A LightningModule, or any module that returns a loss or an output.
        optimizer: Its optimizer.
        batch: A batch on the model's device; a mapping becomes keyword arguments of a module
            without `training_step`, a tuple or list positional ones.
        precision: `"32-true"` runs as the model is, `"bf16-mixed"` and `"16-mixed"` in autocast.

    Returns:
        Sizes in bytes; at the peak of the two steps.

    Raises:
        ValueError: `precision` is an unknown word.
        TypeError: The output holds no loss.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> found = anatomy(model, torch.optim.Adam(model.parameters()), torch.ones(2, 4))
        >>> found.size_of("parameters"), found.size_of("optimizer state")
        (80, 168)
    """
    check_word("precision", precision, PRECISIONS)
    device = next(model.parameters()).device
    module: Any = torch.get_device_module(device)
    with preserved(model, optimizer, device, tensors_of(batch)):
        if device.type == "cuda":
            module.reset_peak_memory_stats(device)
        trace = trace_steps(model, [optimizer], [batch], device.type, precision)
        measured = reserved = None
        if device.type == "cuda":
            measured = int(module.max_memory_allocated(device))
            reserved = int(module.max_memory_reserved(device))
    return read_anatomy(trace, device.type == "cuda", measured, reserved)


def trace_steps(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batches: Sequence[Any],
    device: str,
    precision: str,
    extra: Callable[..., int] | None = None,
    others: Mapping[str, Iterable[Tensor]] | None = None,
) -> MemoryTrace:
    """Run two training steps and return what they allocate.

    Args:
        model: The model, on real or fake tensors.
        optimizers: Its optimizers.
        batches: The micro-batches of each step.
        device: Type of the device.
        precision: One of Lightning's words.
        extra: Tells what operators take and give back within themselves, see `MemoryTrace`.
        others: What else is held, by use.
    """
    trace = MemoryTrace(device, extra)
    label_run(trace, model, optimizers, batches)
    for kind, tensors in (others or {}).items():
        trace.label(tensors, kind)

    def begin_phase(name: str) -> None:
        if name == "optimizer":
            trace.label(_gradients(model), GRADIENTS)
        elif name == "end":
            trace.label(tensors_by_kind(model, optimizers)[OPTIMIZER_STATE], OPTIMIZER_STATE)
        trace.begin_phase(name)

    with warnings.catch_warnings(), trace, trace.naming_modules(model):
        warnings.simplefilter("ignore")
        for _ in range(_STEPS):
            run_step(
                model,
                optimizers,
                batches,
                lambda: precision_context(precision, device),
                begin_phase,
            )
    trace.stop()
    return trace


def label_run(
    trace: MemoryTrace, model: nn.Module, optimizers: Iterable[Optimizer], batches: Iterable[Any]
) -> None:
    """Take down what a run holds before a step."""
    for kind, tensors in tensors_by_kind(model, optimizers).items():
        trace.label(tensors, kind)
    for batch in batches:
        trace.label(tensors_of(batch), BATCH)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
