"""What environment variables cost here, of those that are set and need not be.

Sources: [PyTorch's CUDA variables](https://docs.pytorch.org/docs/stable/cuda_environment_variables.html),
[cuBLAS](https://docs.nvidia.com/cuda/cublas/), [lazy loading](https://docs.nvidia.com/cuda/cuda-c-programming-guide/).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from lightning_memopt.core.machine_advice import Finding
from lightning_memopt.core.machine_facts import Host, Machine
from lightning_memopt.core.units import MIB, format_bytes

_MUCH_WORKSPACE = 64 * MIB
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def findings_on_environment(machine: Machine) -> list[Finding]:
    """Return which variables to change, and why; those for CUDA only where there is CUDA."""
    findings = list(_on_host(machine))
    return [*_on_cuda(machine), *findings] if machine.has_cuda else findings


def _on_cuda(machine: Machine) -> Iterator[Finding]:
    variables = machine.variables
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in {"", "0"}:
        text = "each kernel is waited for, which is slow: keep it for debugging"
        yield _unset("CUDA_LAUNCH_BLOCKING", text)
    # PyTorch asks whether it is there, not what it says.
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in variables:
        text = "whatever its value, the allocator keeps no cache, and each tensor waits for the GPU"
        yield _unset("PYTORCH_NO_CUDA_MEMORY_CACHING", text)
    if variables.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        text = "all kernels of all libraries are loaded into the GPU's memory, used or not"
        yield _unset("CUDA_MODULE_LOADING", text)
    workspace = variables.get("CUBLAS_WORKSPACE_CONFIG", "")
    kib = sum(int(size) * int(count) for size, count in re.findall(r":(\d+):(\d+)", workspace))
    if kib * 1024 > _MUCH_WORKSPACE:
        text = (
            f"`{workspace}` takes {format_bytes(kib * 1024)} for each stream that multiplies "
            "matrices: `:4096:8` takes 32.00 MiB"
        )
        yield Finding("CUBLAS_WORKSPACE_CONFIG", text, "export CUBLAS_WORKSPACE_CONFIG=:4096:8")


def _on_host(machine: Machine) -> Iterator[Finding]:
    variables, host = machine.variables, machine.host
    cores = _whole_cores(host)
    threads = variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads.isdecimal() and int(threads) > cores:
        text = f"{threads} threads on {_words(cores)} that this process may use: they wait in turns"
        yield Finding("OMP_NUM_THREADS", text, f"export OMP_NUM_THREADS={cores}")
    elif not threads and cores < host.usable_cores:
        text = (
            f"it isn't set: torch starts {host.usable_cores} threads, the control group grants "
            f"{_words(cores)}"
        )
        yield Finding("OMP_NUM_THREADS", text, f"export OMP_NUM_THREADS={cores}")
    preloaded = variables.get("LD_PRELOAD", "")
    found = [name for name in _ALLOCATORS if name in preloaded]
    if found and not machine.visible:
        files = ", ".join(PurePath(part).name for part in re.split(r"[ :]+", preloaded) if part)
        text = (
            f"memory comes from {found[0]} ({files}): on a CPU `memory/allocated_gib` counts "
            "glibc's malloc and won't see it, and `EmptyCache` can't trim it"
        )
        yield _unset("LD_PRELOAD", text)


def _whole_cores(host: Host) -> int:
    return max(1, min(host.usable_cores, int(host.quota or host.usable_cores)))


def _words(cores: int) -> str:
    return f"{cores} core{'s' if cores > 1 else ''}"


def _unset(name: str, text: str) -> Finding:
    return Finding(name, text, f"unset {name}")
