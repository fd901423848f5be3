"""A training step of any module, in the order in which Lightning runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.core.batches import items_of
from lightning_memopt.core.patching import PatchedMethod

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
}
PRECISIONS = (*AUTOCAST, *TRUE)


def loss_of(module: Any, batch: Any) -> Tensor:
    """Return the loss of a batch.

    That is what `training_step` returns, if the module has one. Of any other module it is the loss
    that it returns (of a mapping of losses their sum), or the mean of its first output.

    Args:
        module: The module.
        batch: Its batch: a mapping becomes keyword arguments, a tuple or list positional ones.

    Raises:
        TypeError: There is nothing to run backward from.
    """
    if hasattr(module, "training_step"):
        output = module.training_step(batch, 0)
    elif isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, list | tuple) else module(batch)
    loss = _loss_in(output)
    if loss is None:
        raise TypeError(
            f"The output of `{type(module).__name__}` must hold a tensor that needs gradients, got "
            f"`{type(output).__name__}`."
        )
    return loss


def run_step(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    batches: Sequence[Any],
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    begin_phase: Callable[[str], None] = lambda name: None,
) -> None:
    """Run forward and backward of each micro-batch, then step the optimizers.

    Args:
        module: The module.
        optimizers: Its optimizers.
        batches: The micro-batches of one step.
        precision: Makes the context that forward runs in.
        begin_phase: Told when forward, backward and the optimizers' step begin, and when they end.
    """
    for number, batch in enumerate(batches):
        begin_phase("forward")
        with precision():
            loss = loss_of(module, batch)
        if number == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        begin_phase("backward")
        (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        del loss
    begin_phase("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    begin_phase("end")


@contextmanager
def precision_context(precision: str, device: str) -> Iterator[None]:
    """Make the context of a forward in Lightning: autocast, or the default type."""
    if precision in AUTOCAST:
        with torch.autocast(device, AUTOCAST[precision], cache_enabled=False):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(TRUE[precision] if precision != "32-true" else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def optimizers_in(value: Any) -> list[Optimizer]:
    """Return the optimizers in what `configure_optimizers` has returned."""
    if isinstance(value, Optimizer):
        return [value]
    return [found for _, item in items_of(value) for found in optimizers_in(item)]


@contextmanager
def without_metrics(module: nn.Module) -> Iterator[None]:
    """Let metrics be updated without a look at values, which may not be there."""
    from torchmetrics import Metric

    patches = [
        _NoUpdate(metric, name)
        for metric in module.modules()
        if isinstance(metric, Metric)
        for name in ("update", "forward", "compute")
    ]
    try:
        yield
    finally:
        for patch in patches:
            patch.restore()


class _NoUpdate(PatchedMethod):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.name == "update" else torch.zeros(())


def _loss_in(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        if not output.requires_grad:
            return None
        return output if output.dim() == 0 else output.float().mean()
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss
        values = list(output.values())
        if values and all(isinstance(v, Tensor) and v.dim() == 0 for v in values):
            return torch.stack(values).sum()
    for _, item in items_of(output):
        found = _loss_in(item)
        if found is not None:
            return found
    return None
