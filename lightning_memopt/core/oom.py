"""Telling an out-of-memory error from every other error."""

from __future__ import annotations

import torch

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
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
)


class SampleTooLargeError(torch.OutOfMemoryError):
    """Not even one sample fits in the memory there is."""


def is_out_of_memory(exception: BaseException) -> bool:
    """Return whether an exception says that a device or the host ran out of memory.

    Recognised are `torch.OutOfMemoryError`, Python's `MemoryError`, the wordings of CUDA, HIP, XPU,
    MPS and the CPU (Linux and Windows), failed allocations of cuBLAS and its relatives, and an
    exception that was raised from one of these.

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
    seen: set[int] = set()
    error: BaseException | None = exception
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS):
            return True
        error = error.__cause__
    return False
