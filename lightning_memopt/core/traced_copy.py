"""A training step traced on a copy of a model that has no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_memopt.core.batches import count_samples, repeat_samples
from lightning_memopt.core.checks import check_positive_int
from lightning_memopt.core.cuda_like import cuda_like
from lightning_memopt.core.cuda_temporaries import temporary_bytes
from lightning_memopt.core.fake_copy import FakeCopies
from lightning_memopt.core.flops import Flops
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.memory_trace import MemoryTrace
from lightning_memopt.core.random_state import RandomState
from lightning_memopt.core.recompute import checkpoint_layers
from lightning_memopt.core.traced_step import trace_steps
from lightning_memopt.core.training_step import TRUE, optimizers_in, without_metrics

BUCKETS = "gradient buckets"


@dataclass(frozen=True)
class Plan:
    """A training whose step is to be estimated; see `estimate` for what its values mean."""

    module: nn.Module
    batch: Any
    precision: str
    optimizer: Optimizer | str | Callable[[Any], Optimizer] | None
    strategy: str
    checkpoint: str | list[str] | None
    on_cuda: bool
    accumulates: bool = False  # over more micro-batches than the batch has
    foreach: bool = True  # whether optimizers that may work on all parameters at once do so

    def check(self, size: int | None) -> None:
        """Raise what is wrong with the arguments, before anything is tried."""
        if isinstance(self.optimizer, str):
            optimizer_class(self.optimizer)
        if self.checkpoint is not None:
            select_layers(self.module, self.checkpoint)
        if size is not None:
            check_positive_int("micro_batch_size", size)
            if count_samples(self.batch) is None:
                raise TypeError(
                    "`micro_batch_size` needs a `batch` whose samples can be told, got "
                    f"`{type(self.batch).__name__}`."
                )


def trace_copy(
    plan: Plan,
    size: int | None,
    change: Callable[[nn.Module], object] | None = None,
    flops: Flops | None = None,
) -> MemoryTrace:
    """Trace two steps of a fake copy, with `size` samples a micro-batch.

    Args:
        plan: What is to be traced.
        size: Samples of a micro-batch, `None` for the batch as it is.
        change: Changes the copy of the module first.
        flops: Counts the operations of both steps.
    """
    dtype = TRUE.get(plan.precision)
    random_state = RandomState(torch.device("cpu"))
    copies = FakeCopies(None if dtype == torch.float32 else dtype)
    module = copies.module(plan.module).train()
    batch = copies.batch(plan.batch)
    with ExitStack() as stack:
        stack.callback(random_state.put_back)  # from which layers and users' code draw
        stack.enter_context(copies.mode)
        if plan.on_cuda:
            stack.enter_context(cuda_like())
        stack.enter_context(without_metrics(module))
        if change is not None:
            change(module)
        return trace_module(plan, module, batch, size, copies, flops)


def trace_module(
    plan: Plan,
    module: nn.Module,
    batch: Any,
    size: int | None,
    copies: FakeCopies | None,
    flops: Flops | None = None,
) -> MemoryTrace:
    """Trace two steps of a module that may be changed.

    Args:
        plan: What is to be traced.
        module: The module.
        batch: Its batch.
        size: Samples of a micro-batch, `None` for the batch as it is.
        copies: What made the module, if that is fake.
        flops: Counts the operations of both steps.
    """
    samples = count_samples(batch)
    is_part = size is not None and samples is not None and size < samples
    if size is not None:
        batch = repeat_samples(batch, size)
    if plan.checkpoint is not None:
        checkpoint_layers(module, select_layers(module, plan.checkpoint))
    optimizers = _optimizers(plan, module, copies)
    buckets = _buckets(module) if plan.strategy == "ddp" else []

    def extra(func: Any, args: tuple[Any, ...], results: list[Tensor]) -> int:
        if flops is not None:
            flops.add(func, args, results)
        return temporary_bytes(func, args, results) if plan.on_cuda else 0

    # Of many micro-batches, all after the first find the gradients of those before.
    batches = [batch, batch] if is_part or plan.accumulates else [batch]
    return trace_steps(
        module, optimizers, batches, "cpu", plan.precision, extra, {BUCKETS: buckets}
    )


def optimizer_class(name: str) -> Any:
    """Return a class of `torch.optim` by its name, in any case.

    Raises:
        ValueError: There is none of that name.
    """
    classes = {
        each: value
        for each, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    for each, value in classes.items():
        if each.lower() == name.lower():
            return value
    raise ValueError(f"`optimizer` must be one of {', '.join(sorted(classes))}, got {name!r}.")


def _optimizers(plan: Plan, module: nn.Module, copies: FakeCopies | None) -> list[Optimizer]:
    made = list(_made_optimizers(plan, module, copies))
    for optimizer in made if plan.on_cuda else ():
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = plan.foreach  # PyTorch chooses `True` on CUDA
    return made


def _made_optimizers(plan: Plan, module: Any, copies: FakeCopies | None) -> Iterable[Optimizer]:
    trained = [p for p in module.parameters() if p.requires_grad]
    if isinstance(plan.optimizer, Optimizer):
        if copies is not None:
            return [copies.optimizer(plan.optimizer)]
        return [type(plan.optimizer)(trained, **plan.optimizer.defaults)]
    if isinstance(plan.optimizer, str):
        return [optimizer_class(plan.optimizer)(trained)]
    if plan.optimizer is not None:
        return optimizers_in(plan.optimizer(trained))
    if hasattr(module, "configure_optimizers"):
        return optimizers_in(module.configure_optimizers())
    return [AdamW(trained)]


def _buckets(module: nn.Module) -> list[Tensor]:
    """Return what DDP holds beside the gradients: as many bytes again."""
    numbers: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
    return [torch.empty(number, dtype=dtype) for dtype, number in numbers.items()]
