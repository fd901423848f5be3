"""The CPU as a memory device: what malloc has in use, what is resident, its peak, and the limits.

glibc answers `mallinfo2` in about a microsecond and gives freed pages back on `malloc_trim`; Linux
keeps the resident peak (`VmHWM`) and resets it when 5 is written to `/proc/self/clear_refs`
(`man 5 proc`). Elsewhere resident memory comes from psutil and the rest is unknown (`None`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_MALLINFO2_FIELDS = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]
_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = b"5"
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
# Version 2 of control groups has one tree, version 1 one for each controller.
_CGROUP_2 = (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file")
_CGROUP_1 = (
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2_FIELDS]


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libc.so.6")
        library.mallinfo2.restype = _Mallinfo2
        library.malloc_trim.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError):  # musl, or a glibc before 2.33
        return None
    return library


def allocated_bytes() -> int | None:
    """Return the bytes that malloc has handed out, or `None` where glibc doesn't answer."""
    library = _glibc()
    if library is None:
        return None
    info = library.mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    try:
        return int(_STATM.read_bytes().split()[1]) * mmap.PAGESIZE
    except OSError:
        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int | None:
    """Return the resident peak since the last reset in bytes, or `None` where it is unknown."""
    return _status_bytes(b"VmHWM:")


def reset_peak_resident() -> bool:
    """Start a new resident peak and return whether the system allows it."""
    try:
        # A buffered write would report a refusal only when the file is closed.
        with _CLEAR_REFS.open("wb", buffering=0) as file:
            file.write(_RESET_PEAK)
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Give what malloc holds free back to the system; does nothing where there is no glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def system_used_and_total() -> tuple[int, int]:
    """Return the memory in use on this machine and its total, in bytes."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available), int(memory.total)


def usable_bytes() -> int:
    """Return how large this process's resident memory may become, in bytes.

    The least of its limit and of what is resident now plus what the machine has available.
    """
    return min(limit_bytes(), resident_bytes() + int(psutil.virtual_memory().available))


def limit_bytes() -> int:
    """Return how large this process's resident memory may become if others used none, in bytes.

    The least of the machine's memory, what the control group leaves to this process, and what the
    limit on the address space leaves.
    """
    room = [value for value in (_cgroup_room(), _address_space_room()) if value is not None]
    resident = resident_bytes()
    total = int(psutil.virtual_memory().total)
    return min([total, *(resident + max(0, value) for value in room)])


def cgroup_limit_bytes() -> int | None:
    """Return the tightest limit of this process's control groups in bytes, `None` without one."""
    limits: list[int] = []
    for folder, (limit, *_) in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((folder / limit).read_text()))
    tightest = min(limits, default=None)
    # Version 1 writes the largest number of pages for no limit.
    is_limit = tightest is not None and tightest < psutil.virtual_memory().total
    return tightest if is_limit else None


def _cgroup_room() -> int | None:
    """Return the least room that a control group of this process has, and those around it."""
    rooms: list[int] = []
    for folder, names in _cgroups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            rooms.append(_room_of_cgroup(folder, *names))
    return min(rooms, default=None)


def _cgroups() -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders of this process's control groups, innermost first, and their files."""
    try:
        lines = _CGROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, *names = _CGROUP_1 if controllers else _CGROUP_2
        inner = root / path.lstrip("/")
        # Inside a container the path may be the host's: then only the root is there to be read.
        for folder in (inner, *inner.parents[: len(inner.parts) - len(root.parts)]):
            yield folder, names


def _room_of_cgroup(folder: Path, limit: str, usage: str, cached: str) -> int:
    room = int((folder / limit).read_text()) - int((folder / usage).read_text())
    # Files that were read count as used until somebody needs the memory.
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return room + int(statistics.get(cached, 0))


def address_space_limit_bytes() -> int | None:
    """Return `RLIMIT_AS`, the limit on the address space, in bytes, `None` without one."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _address_space_room() -> int | None:
    limit, size = address_space_limit_bytes(), _status_bytes(b"VmSize:")
    return None if limit is None or size is None else limit - size


def _status_bytes(key: bytes) -> int | None:
    try:
        status = _STATUS.read_bytes()
    except OSError:
        return None
    start = status.find(key)
    return None if start < 0 else int(status[start + len(key) :].split(None, 1)[0]) * 1024
