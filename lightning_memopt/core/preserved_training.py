"""A model and its optimizer put back after they have been used, whatever was done with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.core.random_state import RandomState
from lightning_memopt.core.rewind import Attributes


class Preserved:
    """What a model, its optimizer and the random generators are now, kept in the host's memory.

    Kept are parameters, buffers, gradients, modes, attributes and what the lists, dicts and sets
    among them hold, the optimizer's state and options, and all random states. Objects of a user's
    own that hang on a module are not looked into.

    Attributes:
        host_bytes: Memory that the copies take.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._random = RandomState(device)
        self._attributes = Attributes(list(module.modules()))
        parameters = list(module.parameters())
        self._flags = [(p, p.requires_grad, p.grad) for p in parameters]
        tensors = {id(t): t for t in [*parameters, *self._attributes.tensors(), *module.buffers()]}
        self._optimizer = optimizer
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self._state_items = [(s, dict(s)) for s in self._state.values() if isinstance(s, dict)]
        for _, items in self._state_items:
            tensors |= {id(value): value for value in items.values() if isinstance(value, Tensor)}
        self._tensors = list(tensors.values())
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
        self._random.put_back()


@contextmanager
def preserved(module: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[Preserved]:
    """Put a model and its optimizer back at the end, also after an exception."""
    kept = Preserved(module, optimizer, device)
    try:
        yield kept
    finally:
        kept.put_back()
