"""How much each batch of an accumulation window counts, applied to losses and gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memopt.core.batches import count_samples

Weight = float | Tensor
Weigher = Callable[[Any], Weight | None]


def weigher(weigh_by: str | Callable[[Any], Weight]) -> Weigher:
    """Return the function that `weigh_by` names.

    Args:
        weigh_by: `"samples"`, `"batches"`, a function of a batch, or its dotted name.

    Returns:
        A function from a batch to its weight, or to `None` where it can't be told.

    Raises:
        ValueError: A dotted name leads to nothing that can be called.
    """
    if weigh_by == "samples":
        return count_samples
    if weigh_by == "batches":
        return _one
    if not isinstance(weigh_by, str):
        return weigh_by
    module_name, _, name = weigh_by.rpartition(".")
    try:
        function: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"`weigh_by` must be a dotted name, got {weigh_by!r}: {error}.") from error
    if not callable(function):
        raise ValueError(f"`weigh_by` must name a function, got {weigh_by!r}, a {type(function)}.")
    return function  # type: ignore[no-any-return]


class WindowWeights:
    """The weights of one window, relative to a reference so that equal batches change nothing.

    Lightning divides each loss by the factor. A batch's loss is multiplied by its weight relative
    to the reference before backward, and at the end the gradients by factor x reference / sum of
    the weights; where all is regular both are exactly 1 and are left out. Weights on a device stay
    there.

    Attributes:
        weigh: From a batch to its weight, or `None` where it can't be told.
        reference: The weight that counts as 1; the same on every rank.
        total: Sum of the weights in this window so far.
    """

    def __init__(self, weigh: Weigher) -> None:
        self.weigh = weigh
        self._weight: Weight = 1.0
        self.reference: float | None = None
        self.total: Weight = 0.0

    @property
    def unit(self) -> float:
        """The weight that counts as 1, also where nothing has been weighed."""
        return self.reference or 1.0

    def take(self, weight: Weight) -> None:
        """Make `weight` that of the batch at hand."""
        self._weight = weight

    def scale(self, loss: Tensor) -> None:
        """Multiply a loss in place and count its batch in."""
        relative = self._weight / self.unit
        if not _is_one(relative):
            loss.mul_(relative)
        self.total = self.total + self._weight

    def begin(self) -> None:
        """Start a window."""
        self.total = 0.0


def correct(parameters: Iterable[nn.Parameter], expected: float, total: Weight) -> None:
    """Multiply gradients in place by `expected / total`.

    A window without weight is left as it is.

    Args:
        parameters: Those whose gradients are the sum over a window.
        expected: The sum of weights for which the gradients are right as they are.
        total: The sum of weights.
    """
    if isinstance(total, Tensor):
        scale: Weight = torch.where(total > 0, expected / total, torch.ones_like(total))
    else:
        scale = expected / total if total > 0 else 1.0
    if _is_one(scale):
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if dense:
        torch._foreach_mul_(dense, scale)
    for gradient in gradients:
        if gradient.is_sparse:
            gradient.mul_(scale)


def _one(batch: Any) -> float:
    return 1.0


def _is_one(weight: Weight) -> bool:
    return not isinstance(weight, Tensor) and weight == 1.0
