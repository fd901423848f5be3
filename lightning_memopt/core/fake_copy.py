"""Copies of models, optimizers and batches that have shapes and types, but no memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from lightning_memopt.core.batches import items_of, rebuild


class FakeCopies:
    """Makes copies of which tensors are fake, shared ones shared.

    Args:
        dtype: Type that floating-point weights and batches get; `None` leaves them.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._dtype = dtype
        self._memo: dict[int, Any] = {}

    def module(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module; its weights may be on the meta device."""
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in self._memo:
                self._memo[id(tensor)] = self._weight(tensor)
        trainer = vars(module).get("_trainer")
        if trainer is not None:
            self._memo[id(trainer)] = None
        return copy.deepcopy(module, self._memo)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return a copy of an optimizer of a module that was copied, before its first step."""
        made = object.__new__(type(optimizer))
        kept = {name: value for name, value in vars(optimizer).items() if name != "state"}
        vars(made).update(copy.deepcopy(kept, self._memo))
        made.state = defaultdict(dict)
        return made

    def batch(self, batch: Any) -> Any:
        """Return a copy of a batch."""
        if isinstance(batch, Tensor):
            return self._fake(batch)
        if isinstance(batch, PackedSequence):
            return batch._replace(data=self._fake(batch.data))
        items = [(key, self.batch(item)) for key, item in items_of(batch)]
        return rebuild(batch, items) if items else batch

    def _weight(self, tensor: Tensor) -> Tensor:
        fake = self._fake(tensor)
        if not isinstance(tensor, nn.Parameter):
            return fake
        made = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        made.__dict__.update(vars(tensor))
        return made

    def _fake(self, tensor: Tensor) -> Tensor:
        is_cast = self._dtype is not None and tensor.is_floating_point()
        dtype = self._dtype if is_cast else tensor.dtype
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
