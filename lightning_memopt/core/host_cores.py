"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota() -> float | None:
    """Return the cores' worth of time that control groups grant, `None` without a limit."""
    quotas: list[float] = []
    try:
        lines = _CGROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _ROOT / "cpu" if controllers else _ROOT
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents[: len(inner.parts) - len(root.parts)]):
            # No such file, or no limit: "max", or -1.
            with contextlib.suppress(OSError, ValueError):
                quotas.append(_quota_of(folder, is_version_1=bool(controllers)))
    return min((quota for quota in quotas if quota > 0), default=None)


def _quota_of(folder: Path, is_version_1: bool) -> float:
    if is_version_1:
        quota, period = (
            (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
        )
    else:
        quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)
