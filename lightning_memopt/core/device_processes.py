"""The processes that hold memory of a GPU, asked of NVIDIA's management library."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import pynvml
import torch


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory of a device.

    Attributes:
        pid: Its number.
        name: Its program, `"?"` where that can't be told.
        used: Bytes that it holds, its context included.
    """

    pid: int
    name: str
    used: int


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
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByUUID(uuid)
            )
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    processes = [
        DeviceProcess(each.pid, _name_of(each.pid), each.usedGpuMemory)
        for each in found
        if each.usedGpuMemory is not None
    ]
    return sorted(processes, key=lambda process: -process.used)


def _name_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "?"
