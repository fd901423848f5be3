"""What a device's memory looks like now, read the same way on CUDA, XPU, MPS and the CPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_memopt.core import host_memory

_DEVICE_USED_MAX_AGE_S = 0.25


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory of one device at one moment, in bytes; `None` is unknown.

    Attributes:
        allocated: In use by tensors; on a CPU what malloc has handed out.
        reserved: Held by the caching allocator; on a CPU resident memory.
        peak: Highest `allocated` since the last reset; on a CPU the highest `reserved`.
        device_used: In use on the whole device, by everyone.
        device_total: What the device has.
        alloc_retries: How often the allocator had to flush its cache to serve a request.
    """

    allocated: int
    reserved: int
    peak: int | None
    device_used: int | None
    device_total: int | None
    alloc_retries: int | None

    @property
    def fragmentation(self) -> float:
        """Share of `reserved` that is not allocated, from 0 to 1."""
        return max(0.0, 1 - self.allocated / self.reserved) if self.reserved else 0.0


class MemoryReader(Protocol):
    """Reads one device. `read` never waits for the device."""

    def read(self) -> MemoryReading:
        """Return the figures of this moment."""

    def reset_peak(self) -> None:
        """Start a new peak."""

    def release_cache(self) -> None:
        """Give memory that is reserved but free back to the device."""


def read_memory(device: torch.device | str | int) -> MemoryReading:
    """Read the memory of a device.

    Args:
        device: A device such as `"cuda:0"`, `"xpu"`, `"mps"` or `"cpu"`.

    Returns:
        Bytes in use, reserved and at the peak; what is unknown there is `None`.

    Raises:
        ValueError: The device's memory can't be read by PyTorch.

    Example:
        >>> read_memory("cpu").reserved > 0
        True
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise _unreadable(device) from error
    return memory_reader(found).read()


def memory_reader(device: torch.device) -> MemoryReader:
    """Return a reader for `device`.

    Raises:
        ValueError: The device's memory can't be read by PyTorch.
    """
    if device.type == "cpu":
        return _HostReader()
    if device.type == "mps" and torch.backends.mps.is_available():
        return _MpsReader()
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "memory_stats") and (device.index or 0) < module.device_count():
        return _AcceleratorReader(module, device.index)
    raise _unreadable(str(device))


def _unreadable(device: object) -> ValueError:
    here = '"cpu"'
    if torch.accelerator.is_available():
        here += f' or "{torch.accelerator.current_accelerator()}"'
    return ValueError(
        f"`device` must be one whose memory PyTorch can read here ({here}), got {device!r}."
    )


class _HostReader:
    def __init__(self) -> None:
        self._device = _Throttled(host_memory.system_used_and_total)
        self._has_peak = True

    def read(self) -> MemoryReading:
        resident = host_memory.resident_bytes()
        allocated = host_memory.allocated_bytes()
        used, total = self._device.get(0)  # resident memory changes in every step
        return MemoryReading(
            allocated=resident if allocated is None else allocated,
            reserved=resident,
            peak=host_memory.peak_resident_bytes() if self._has_peak else None,
            device_used=used,
            device_total=total,
            alloc_retries=None,
        )

    def reset_peak(self) -> None:
        # A peak that can't be reset is that of the whole process, not of a phase.
        self._has_peak = host_memory.reset_peak_resident()

    def release_cache(self) -> None:
        host_memory.release_free_memory()


class _AcceleratorReader:
    """CUDA, ROCm, XPU and whatever else has PyTorch's caching allocator and its statistics."""

    def __init__(self, module: Any, index: int | None) -> None:
        self._module = module
        self._index: int = module.current_device() if index is None else index
        self._used = _Throttled(self._used_and_total)

    def read(self) -> MemoryReading:
        allocated, reserved, retries = self._stats()
        used, total = self._used.get(reserved["current"])
        return MemoryReading(
            allocated=allocated["current"],
            reserved=reserved["current"],
            peak=allocated["peak"],
            device_used=used,
            device_total=total,
            alloc_retries=retries,
        )

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._index)

    def release_cache(self) -> None:
        self._module.empty_cache()

    def _stats(self) -> tuple[Mapping[str, int], Mapping[str, int], int]:
        nested = getattr(self._module, "memory_stats_as_nested_dict", None)
        if nested is not None:
            # Flattening some 120 figures, as `memory_stats` does, costs most of its time.
            stats: Any = nested(self._index)
            if not stats:  # the device has not been used yet
                return _NOTHING, _NOTHING, 0
            return (
                stats["allocated_bytes"]["all"],
                stats["reserved_bytes"]["all"],
                stats.get("num_alloc_retries", 0),
            )
        stats = self._module.memory_stats(self._index)
        allocated, reserved = (
            {which: stats.get(f"{name}.all.{which}", 0) for which in ("current", "peak")}
            for name in ("allocated_bytes", "reserved_bytes")
        )
        return allocated, reserved, stats.get("num_alloc_retries", 0)

    def _used_and_total(self) -> tuple[int | None, int | None]:
        try:
            free, total = self._module.mem_get_info(self._index)
        except (AttributeError, RuntimeError):  # not offered for every device
            return None, None
        return total - free, total


class _MpsReader:
    """Apple's GPUs: PyTorch keeps no peak there, so it is unknown."""

    def read(self) -> MemoryReading:
        driver = torch.mps.driver_allocated_memory()
        return MemoryReading(
            allocated=torch.mps.current_allocated_memory(),
            reserved=driver,
            peak=None,
            device_used=None,
            device_total=torch.mps.recommended_max_memory(),
            alloc_retries=None,
        )

    def reset_peak(self) -> None:
        pass

    def release_cache(self) -> None:
        torch.mps.empty_cache()


class _Throttled:
    """Asks for the device-wide figures rarely: it is a call into the driver or the system."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask
        self._next_time = 0.0
        self._reserved = -1
        self._answer: tuple[int | None, int | None] = (None, None)

    def get(self, reserved: int) -> tuple[int | None, int | None]:
        """Return used and total, asked anew when old or when this process's share changed."""
        now = time.monotonic()
        if now >= self._next_time or reserved > self._reserved:
            self._answer = self._ask()
            self._reserved = reserved
            self._next_time = now + _DEVICE_USED_MAX_AGE_S
        return self._answer


_NOTHING: Mapping[str, int] = {"current": 0, "peak": 0}
