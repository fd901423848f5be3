"""Storages of tensors, looked at without being kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, `None` where it has none with an address."""
    try:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, what this rank has
        storage: torch.UntypedStorage = local.untyped_storage()
        # A fake tensor has a device, its storage has not.
        return storage if storage.device.type != "meta" and storage.data_ptr() else None
    except Exception:  # sparse, only traced, not initialized, or of a class that forbids it
        return None


class WeakStorage:
    """A storage that is freed as if nobody looked at it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        make: Any = StorageWeakRef
        self._reference = make(storage)

    @property
    def is_freed(self) -> bool:
        """Whether its memory has been freed."""
        return bool(self._reference.expired())

    # A copy would have the same counted pointer, and count it down a second time.
    def __copy__(self) -> WeakStorage:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakStorage:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("A weak reference to a storage is of this process: it can't be pickled.")
