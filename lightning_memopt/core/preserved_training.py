"""A model and its optimizer put back after they have been used, whatever was done with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.core.generators import same_randomness
from lightning_memopt.core.rewind import Attributes, is_writable


class Preserved:
    """What a model and its optimizer are now, kept in the host's memory.

    Kept are parameters, buffers, gradients, modes, attributes and what the lists, dicts and sets
    among them hold, and the optimizer's state and options. Objects of a user's own that hang on a
    module are not looked into.

    Attributes:
        host_bytes: Memory that the copies take.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, others: Iterable[Tensor] = ()
    ) -> None:
        self._attributes = Attributes([*module.modules(), optimizer])
        parameters = list(module.parameters())
        self._flags = [(p, p.requires_grad, p.grad) for p in parameters]
        found = [*parameters, *self._attributes.tensors(), *module.buffers(), *others]
        tensors = {id(tensor): tensor for tensor in found}
        self._optimizer = optimizer
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self._state_items = [(s, dict(s)) for s in self._state.values() if isinstance(s, dict)]
        for _, items in self._state_items:
            tensors |= {id(value): value for value in items.values() if isinstance(value, Tensor)}
        self._tensors = [tensor for tensor in tensors.values() if is_writable(tensor)]
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self.host_bytes = sum(c.numel() * c.element_size() for c in self._copies)
        for parameter in parameters:
            parameter.grad = None

    def put_back(self) -> None:
        """Go back to where this was made."""
        self._attributes.put_back()
        for parameter, requires_grad, gradient in self._flags:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for held, items in (*self._groups, *self._state_items):
            held.clear()
            held.update(items)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(value)


@contextmanager
def preserved(
    module: nn.Module, optimizer: Optimizer, device: torch.device, others: Iterable[Tensor] = ()
) -> Iterator[Preserved]:
    """Put a model, its optimizer and all randomness back at the end, also after an exception.

    Args:
        module: The model.
        optimizer: Its optimizer.
        device: Where they are.
        others: Tensors whose values are put back too.
    """
    with same_randomness(device, module):
        kept = Preserved(module, optimizer, others)
        try:
            yield kept
        finally:
            kept.put_back()
