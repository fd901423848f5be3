"""What this machine is and what this process may use of it, read without taking any of it."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import psutil
import pynvml
import torch

from lightning_memopt.core import allocator_settings, host_memory
from lightning_memopt.core.failure_place import first_line
from lightning_memopt.core.host_cores import core_quota, usable_cores
from lightning_memopt.core.machine_facts import Device, Host, Machine, Torch
from lightning_memopt.core.memory_limits import usable_bytes
from lightning_memopt.core.nvidia_devices import read_nvidia
from lightning_memopt.core.package_versions import read_packages
from lightning_memopt.core.precision import computes_in_bf16
from lightning_memopt.core.visible_devices import VARIABLE, show_visible

VARIABLES = (
    allocator_settings.CUDA_NAME,
    allocator_settings.NAME,
    VARIABLE,
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "OMP_NUM_THREADS",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


def read_machine(nvml: Any = pynvml) -> Machine:
    """Return what was found on this machine; what can't be read there is `None`, never an error.

    NVIDIA's GPUs are asked through NVIDIA's management library, which makes no CUDA context. Where
    only PyTorch can tell (ROCm, XPU, an NVIDIA GPU without that library), asking it makes a context
    of some hundred MiB on each such device until this process ends.

    Args:
        nvml: NVIDIA's library.
    """
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    driver, cards = read_nvidia(nvml)
    found = _torch()
    if found.is_cuda_available and found.hip is None and cards:
        share = _share_of_settings(found.version, variables)
        devices = [
            _with_usable(device, share) for device in show_visible(cards, variables.get(VARIABLE))
        ]
    elif found.is_cuda_available:
        devices = _devices_of_torch("cuda")
    else:
        reason = VARIABLE if _hides_all(cards, variables.get(VARIABLE)) else "CUDA isn't available"
        devices = [replace(card, hidden_by=card.hidden_by or reason) for card in cards]
    devices += [device for kind in ("xpu", "mps") for device in _devices_of_torch(kind)]
    return Machine(
        platform=_platform(),
        driver=driver,
        torch=found,
        devices=tuple(sorted(devices, key=lambda device: device.torch_name is None)),
        host=_host(),
        packages=read_packages(),
        variables=variables,
    )


def version_pair(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    Example:
        >>> version_pair("2.14.1+cu130")
        (2, 14)
    """
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _hides_all(cards: Iterable[Device], variable: str | None) -> bool:
    devices = show_visible(list(cards), variable)
    return variable is not None and not any(device.torch_name for device in devices)


def _share_of_settings(version: str, variables: Mapping[str, str]) -> float:
    """Return the share of a device that the allocator's settings leave to this process."""
    settings = allocator_settings.read_settings(variables, version_pair(version), _platform())
    value = settings.values.get("per_process_memory_fraction", "1")
    try:
        return min(1.0, max(0.0, float(value)))
    except ValueError:
        return 1.0


def _with_usable(device: Device, share: float) -> Device:
    """Return a device with what this process may use of it."""
    if device.torch_name is None or device.total is None or device.free is None:
        return device
    cuda: Any = torch.cuda
    own = reserved = 0
    if cuda.is_initialized():
        # The allocator knows its own figures without a context on that device.
        reserved = int(cuda.memory_reserved(device.torch_name))
        own = max(device.own, reserved)
        if hasattr(cuda, "get_per_process_memory_fraction"):
            share = float(cuda.get_per_process_memory_fraction(device.torch_name))
    usable = min(int(share * device.total), device.free + reserved)
    return replace(device, own=own, usable=usable)


def _devices_of_torch(kind: str) -> list[Device]:
    """Return the devices of a kind that torch alone can tell of."""
    module: Any = getattr(torch, kind, None)
    try:
        if kind == "mps":
            is_there = torch.backends.mps.is_available()
            return [_mps()] if is_there else []
        if module is None or not module.is_available():
            return []
        return [_device_of_torch(module, kind, index) for index in range(module.device_count())]
    # A driver that is half there fails in many ways.
    except Exception as error:
        return [Device(kind, hidden_by=first_line(error))]


def _device_of_torch(module: Any, kind: str, index: int) -> Device:
    device = torch.device(kind, index)
    is_cuda = kind == "cuda" and torch.version.hip is None
    found = Device(
        name=module.get_device_name(index),
        torch_name=str(device),
        capability=module.get_device_capability(index) if is_cuda else None,
        is_bf16=computes_in_bf16(device),
        own=int(module.memory_reserved(index)),
    )
    try:
        free, total = module.mem_get_info(index)
    except (AttributeError, RuntimeError):  # not offered for every device
        return replace(found, total=module.get_device_properties(index).total_memory)
    return replace(found, total=int(total), free=int(free), usable=usable_bytes(device))


def _mps() -> Device:
    return Device(
        name=platform.processor() or "Apple GPU",
        torch_name="mps",
        total=int(torch.mps.recommended_max_memory()),
        own=int(torch.mps.driver_allocated_memory()),
        is_bf16=computes_in_bf16(torch.device("mps")),
    )


def _torch() -> Torch:
    module: Any = torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    error = str(caught[-1].message) if caught else None
    if not is_available and error is None and module.backends.cuda.is_built():
        try:
            module.cuda.init()  # fails, and says why
        except Exception as found:
            error = first_line(found)
    version = str(torch.__version__)
    return Torch(version, torch.version.cuda, torch.version.hip, is_available, error)


def _host() -> Host:
    memory = psutil.virtual_memory()
    return Host(
        total=int(memory.total),
        available=int(memory.available),
        usable=host_memory.usable_bytes(),
        cgroup_limit=host_memory.cgroup_limit_bytes(),
        address_space_limit=host_memory.address_space_limit_bytes(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        quota=core_quota(),
        is_bf16=computes_in_bf16(torch.device("cpu")),
    )


def _platform() -> str:
    is_wsl = sys.platform == "linux" and "microsoft" in platform.release().lower()
    return "wsl" if is_wsl else sys.platform
