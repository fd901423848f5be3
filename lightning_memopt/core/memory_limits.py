"""How much of a device this process may use."""

from __future__ import annotations

from typing import Any

import torch

from lightning_memopt.core import host_memory


def usable_bytes(device: torch.device) -> int | None:
    """Return how much of a device this process may use, in bytes, or `None` where it is unknown.

    That is what it holds already and what is free, within its own share where it has one
    (`set_per_process_memory_fraction`); on a CPU see `host_memory.usable_bytes`.
    """
    if device.type == "cpu":
        return host_memory.usable_bytes()
    limit = limit_bytes(device)
    if limit is None:
        return None
    module: Any = torch.get_device_module(device)
    free = int(module.mem_get_info(device)[0])
    return min(limit, free + int(module.memory_reserved(device)))


def limit_bytes(device: torch.device) -> int | None:
    """Return how much of a device this process might use if others used none, in bytes.

    That is the device's total, or this process's own share of it; on a CPU see
    `host_memory.limit_bytes`. `None` where it is unknown.
    """
    if device.type == "cpu":
        return host_memory.limit_bytes()
    module: Any = torch.get_device_module(device)
    try:
        total = module.mem_get_info(device)[1]
    except (AttributeError, RuntimeError):  # not offered for every device
        return None
    share = getattr(module, "get_per_process_memory_fraction", None)
    return int(total if share is None else min(total, share(device) * total))
