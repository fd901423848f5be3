"""PyTorch's record of every allocation, with the Python lines that asked for it.

One record serves all who want it at the same time, and one that was on already is left alone. The
snapshot is what https://pytorch.org/memory_viz opens.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Snapshot = dict[str, Any]
_users = 0


def can_record_history(device: torch.device) -> bool:
    """Return whether PyTorch keeps a record of the allocations on a device."""
    return device.type != "cpu" and hasattr(_memory_module(device), "_record_memory_history")


@contextmanager
def recorded_history(device: torch.device, max_entries: int) -> Iterator[None]:
    """Record allocations, with the Python stack of each, while the context is open.

    Contexts may overlap in any order: the first starts the record and the last ends it.

    Args:
        device: Where allocations are recorded; nothing happens where PyTorch can't.
        max_entries: The record keeps so many of the latest events; that of the first context holds.
    """
    global _users
    if not can_record_history(device) or (_users == 0 and _is_on(device)):
        yield
        return
    module = _memory_module(device)
    if _users == 0:
        module._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=max_entries
        )
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if _users == 0:
            module._record_memory_history(None)


def take_snapshot(device: torch.device) -> Snapshot | None:
    """Return the record and the state of the allocator, `None` where nothing is recorded."""
    if not can_record_history(device) or not _is_on(device):
        return None
    snapshot: Snapshot = _memory_module(device)._snapshot()
    return snapshot


def save_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot as https://pytorch.org/memory_viz opens it."""
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=pickle.HIGHEST_PROTOCOL)


def _memory_module(device: torch.device) -> Any:
    return getattr(getattr(torch, device.type, None), "memory", None)


def _is_on(device: torch.device) -> bool:
    """Return whether anybody records; only CUDA can tell about others."""
    if device.type == "cuda":
        return bool(torch._C._cuda_isHistoryEnabled())
    return _users > 0
