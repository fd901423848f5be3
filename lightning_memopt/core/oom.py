"""Telling an out-of-memory error from every other error."""

from __future__ import annotations

import errno
import re

import torch

from lightning_memopt.core.units import parse_size

# A DataLoader's worker says so where the type of its error can't be made again.
_IN_WORKER = re.compile(r"^caught \w*memoryerror in ")
# oneDNN says so where it can't allocate, and for sizes that it can't do; of a description that it
# doesn't know it says "a primitive descriptor".
_ONEDNN = re.compile(r"could not create a primitive(?! descriptor)")
_REQUEST = re.compile(r"allocate (\d+(?:\.\d+)?) ?([KMGT]i?B|bytes)\b")

# What PyTorch and its libraries say where they don't raise `torch.OutOfMemoryError`.
_TEXTS = (
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "mps backend out of memory",
    "cuda error: out of memory",
    "hip error: out of memory",
    "cublas_status_alloc_failed",
    "hipblas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cuda driver error: out of memory",
    "cuda failure 2 'out of memory'",
    "cuda failure 'out of memory'",
    "_device_allocation_failed",  # cuDNN since version 9
    "_host_allocation_failed",
    "cufft_alloc_failed",
    "std::bad_alloc",
    "cannot allocate memory (12)",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
)


class SampleTooLargeError(torch.OutOfMemoryError):
    """Not even one sample fits in the memory there is."""


def is_out_of_memory(exception: BaseException) -> bool:
    """Return whether an exception says that a device or the host ran out of memory.

    Recognised are `torch.OutOfMemoryError`, Python's `MemoryError`, the wordings of CUDA, HIP, XPU,
    MPS and the CPU (Linux and Windows), failed allocations of cuBLAS and its relatives, the
    system's `ENOMEM`, and an exception that was raised from one of these.

    Args:
        exception: Any exception.

    Returns:
        Whether memory was the reason.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    return out_of_memory_in(exception) is not None


def out_of_memory_in(exception: BaseException) -> BaseException | None:
    """Return the exception that says so: this one, or one that it was raised from."""
    seen: set[int] = set()
    error: BaseException | None = exception
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return error
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return error
        if isinstance(error, RuntimeError) and _says_so(str(error).lower()):
            return error
        error = error.__cause__
    return None


def _says_so(text: str) -> bool:
    patterns = _IN_WORKER.match(text), _ONEDNN.search(text)
    return any(each in text for each in _TEXTS) or any(patterns)


def requested_bytes(error: BaseException) -> int | None:
    """Return how much was asked for, as the text of an error has it (rounded there).

    Example:
        >>> requested_bytes(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        2147483648
    """
    found = _REQUEST.search(str(error))
    if found is None or not float(found[1]):
        return None
    size, unit = found.groups()
    return parse_size(f"{size} {'B' if unit == 'bytes' else unit}").of(0)
