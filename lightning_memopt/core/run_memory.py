"""What the memory of a training run is held by: parameters, gradients, activations and so on."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.core.activations import KeptForBackward
from lightning_memopt.core.autograd_graph import has_graph
from lightning_memopt.core.batches import tensors_of
from lightning_memopt.core.replay import tensors_in
from lightning_memopt.core.storages import storage_of

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
BUFFERS = "buffers"
BATCH = "batch"
ACTIVATIONS = "activations"


@dataclass(frozen=True)
class TensorGroup:
    """Live tensors of one shape and type.

    Attributes:
        shape: Their shape.
        dtype: Their type.
        count: How many there are, each storage once.
        size: Bytes of their storages together.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int
    size: int


class RunMemory:
    """The storages of a training run on one device, each counted once and to one kind.

    Only for a run that has ended, as it looks into graphs (see `saved_tensors`).

    Args:
        device: Storages elsewhere are left out.
        model: The model.
        optimizers: Its optimizers.
        batch: The batch at hand.

    Attributes:
        sizes: Bytes of each kind.
        kinds: Kind of each storage, by its address.
        kept: The activations.
        float32_activations: Bytes of those that are float32.
    """

    def __init__(
        self, device: torch.device, model: nn.Module, optimizers: Iterable[Optimizer], batch: Any
    ) -> None:
        self._device = device
        self._live = list(_live_tensors())
        self.kinds: dict[int, str] = {}
        self.sizes: dict[str, int] = {}
        for kind, tensors in tensors_by_kind(model, optimizers).items():
            self._count(kind, tensors)
        self._count(BATCH, tensors_of(batch))
        with_graph = [tensor for tensor in self._live if has_graph(tensor)]
        here = [tensor for tensor in with_graph if self._storage(tensor) is not None]
        self.kept = KeptForBackward(model, here, self.kinds)
        self.kinds |= {each.address: ACTIVATIONS for each in self.kept.storages}
        self.sizes[ACTIVATIONS] = self.kept.total_bytes
        self.float32_activations = sum(
            each.size for each in self.kept.storages if each.dtype == torch.float32
        )

    def tensors_by_shape(self) -> list[TensorGroup]:
        """Return the live tensors that Python knows, of equal shape together, largest first."""
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
        seen: set[int] = set()
        for tensor in self._live:
            storage = self._storage(tensor)
            if storage is not None and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                with suppress(RuntimeError):  # a nested tensor has no shape
                    group = groups.setdefault((tuple(tensor.shape), tensor.dtype), [])
                    group.append(storage.nbytes())
        found = [
            TensorGroup(shape, dtype, len(group), sum(group))
            for (shape, dtype), group in groups.items()
        ]
        return sorted(found, key=lambda group: -group.size)

    def _count(self, kind: str, tensors: Iterable[Tensor]) -> None:
        total = 0
        for tensor in tensors:
            storage = self._storage(tensor)
            if storage is not None and storage.data_ptr() not in self.kinds:
                self.kinds[storage.data_ptr()] = kind
                total += storage.nbytes()
        self.sizes[kind] = total

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor if it is on the device."""
        storage = storage_of(tensor)
        if storage is None or storage.device.type != self._device.type:
            return None
        is_here = self._device.type == "cpu" or storage.device.index == self._device.index
        return storage if is_here else None


def tensors_by_kind(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, list[Tensor]]:
    """Return what a run holds between its steps: parameters, gradients, state and buffers."""
    parameters: list[Tensor] = list(model.parameters())
    return {
        PARAMETERS: parameters,
        GRADIENTS: [p.grad for p in parameters if p.grad is not None],
        OPTIMIZER_STATE: [tensor for each in optimizers for tensor in tensors_in(each.state)],
        BUFFERS: list(model.buffers()),
    }


def _live_tensors() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        # `isinstance` would ask a proxy for its `__class__`, which may do anything.
        if issubclass(type(thing), Tensor):
            yield thing
