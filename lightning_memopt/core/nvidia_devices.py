"""NVIDIA's GPUs and their MIG instances, asked of NVIDIA's management library.

Asking it needs no CUDA context, which would take some hundred MiB of each GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pynvml

from lightning_memopt.core.device_processes import processes_of
from lightning_memopt.core.machine_facts import Device, DeviceProcess, Driver
from lightning_memopt.core.precision import BF16_CAPABILITY

NO_INSTANCE = "MIG is on, but there is no MIG instance"
_UNKNOWN = "the driver doesn't tell"
T = TypeVar("T")


def read_nvidia(nvml: Any = pynvml) -> tuple[Driver, list[Device]]:
    """Return the driver and all devices that it shows, in its order.

    A card that is cut into MIG instances is replaced by them; one that is lost or may not be asked
    is there with `hidden_by`. Where the library or the driver is missing, `Driver.error` says so.

    Args:
        nvml: NVIDIA's library.
    """
    try:
        nvml.nvmlInit()
    # A library of an older driver lacks functions; a broken one fails to load.
    except (pynvml.NVMLError, OSError, AttributeError) as error:
        return Driver(error=str(error)), []
    try:
        version = _ask(nvml.nvmlSystemGetDriverVersion)
        number = _ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        cuda = None if number is None else (number // 1000, number % 1000 // 10)
        driver = Driver(None if version is None else _text(version), cuda)
        return driver, list(_devices(nvml))
    except pynvml.NVMLError as error:
        return Driver(error=str(error)), []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            nvml.nvmlShutdown()


def _devices(nvml: Any) -> Iterator[Device]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            yield Device(f"GPU {index}", hidden_by=str(error))
            continue
        card = _device(nvml, handle)
        mode = _ask(nvml.nvmlDeviceGetMigMode, handle)
        if mode is None or not mode[0]:
            yield replace(card, is_mig_on=None if mode is None else False)
            continue
        instances = [
            _device(nvml, instance, card)
            for at in range(_ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
            if (instance := _ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, at)) is not None
        ]
        yield from instances or [replace(card, is_mig_on=True, hidden_by=NO_INSTANCE)]


def _device(nvml: Any, handle: Any, card: Device | None = None) -> Device:
    """Return what the driver tells of a card, or of a MIG instance of `card`."""
    capability = card.capability if card else _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    total, free = _total_and_free(nvml, handle)
    processes, own = _other_processes(nvml, handle)
    name = _ask(nvml.nvmlDeviceGetName, handle) or (card.name if card else _UNKNOWN)
    return Device(
        name=_text(name),
        uuid=_text(_ask(nvml.nvmlDeviceGetUUID, handle) or ""),
        capability=capability,
        is_mig_on=True if card else None,
        mig_card=card.uuid if card else None,
        total=total,
        free=free,
        own=own,
        processes=processes,
        is_bf16=None if capability is None else capability >= BF16_CAPABILITY,
    )


def _total_and_free(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Return what programs may have, and what of it is free."""
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is not None:
        # What the driver keeps for itself no program gets: CUDA's total is without it, too.
        return int(memory.total - memory.reserved), int(memory.free)
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    return (None, None) if memory is None else (int(memory.total), int(memory.free))


def _other_processes(nvml: Any, handle: Any) -> tuple[tuple[DeviceProcess, ...], int]:
    """Return the processes but this one, and what this one holds."""
    found = _ask(lambda: processes_of(handle, nvml)) or []
    own = sum(process.used for process in found if process.pid == os.getpid())
    return tuple(process for process in found if process.pid != os.getpid()), own


def _ask(question: Callable[..., T], *arguments: Any) -> T | None:
    """Return the driver's answer, `None` where it has none: not supported, or not permitted."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
