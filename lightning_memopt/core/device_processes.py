"""The processes that hold memory of a GPU, asked of NVIDIA's management library."""

from __future__ import annotations

from typing import Any

import psutil
import pynvml
import torch

from lightning_memopt.core.machine_facts import DeviceProcess


def processes_on(device: torch.device) -> list[DeviceProcess]:
    """Return the processes on a device, the one that holds most first.

    Empty where the driver doesn't tell: on other makers' devices, and in some containers and
    virtual machines.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return []
    try:
        pynvml.nvmlInit()
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return processes_of(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def processes_of(handle: Any, nvml: Any = pynvml) -> list[DeviceProcess]:
    """Return the processes on a device that NVIDIA's library has a handle of, likewise.

    Args:
        handle: The library's handle.
        nvml: The library, initialised.

    Raises:
        NVMLError: The driver doesn't tell.
    """
    processes = [
        DeviceProcess(each.pid, _name_of(each.pid), each.usedGpuMemory)
        for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if each.usedGpuMemory is not None
    ]
    return sorted(processes, key=lambda process: -process.used)


def _name_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "?"
