"""How many bytes a forward keeps for backward, exactly and on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedTensors:
    """The storages that autograd keeps, each counted once.

    Attributes:
        storages: Bytes of each storage by its address; parameters and buffers left out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.storages: dict[int, int] = {}
        self._left_out = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
        }
        # Held until the end: an address that is freed is given to another tensor.
        self._held: list[torch.UntypedStorage] = []

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages together."""
        return sum(self.storages.values())

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that is kept."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._left_out and address not in self.storages:
            self.storages[address] = storage.nbytes()
            self._held.append(storage)


@contextmanager
def record_saved_tensors(model: nn.Module) -> Iterator[SavedTensors]:
    """Record what is kept for backward by the forwards within.

    What a checkpointed module keeps is its inputs: the rest is seen only by the checkpoint. The
    record holds on to the storages, so memory is not representative while it exists.

    Args:
        model: Its parameters and buffers are left out.

    Example:
        >>> model = nn.Linear(4, 4)
        >>> with record_saved_tensors(model) as saved:
        ...     _ = model(torch.ones(2, 4))
        >>> saved.total_bytes
        32
    """
    saved = SavedTensors(model)

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        # The tensor itself, where it is an output, would hold the node that holds it.
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
