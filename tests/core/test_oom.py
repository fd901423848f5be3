import pytest
import torch

from lightning_memopt.core.oom import SampleTooLargeError, is_out_of_memory

TEXTS = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB)",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "HIP error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA driver error: out of memory",
    "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "std::bad_alloc",
    "unable to mmap 4096 bytes from file </torch_1>: Cannot allocate memory (12)",
    "Caught MemoryError in DataLoader worker process 0.",
    "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried",
    "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried",
    "could not create a primitive",
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("could not create a primitive descriptor for a convolution forward"),
    ValueError("CUDA out of memory."),  # whoever says so by another type quotes it
    KeyError("out of memory"),
    KeyboardInterrupt(),
    OSError(2, "No such file or directory"),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nMemoryError is no word"),
]


def raised_from(cause, error):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("text", TEXTS)
def test_a_wording_of_a_library_is_recognised(text):
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("any text"), MemoryError(), OSError(12, "x")], ids=repr
)
def test_the_types_are_recognised_whatever_they_say(error):
    assert is_out_of_memory(error)


def test_a_real_one_is_recognised():
    with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory") as caught:
        torch.empty(2**62, dtype=torch.int8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_an_error_raised_from_one_is_recognised_at_any_depth():
    error = RuntimeError("CUDA out of memory.")
    for wrapper in (RuntimeError("in a worker"), ValueError("in a step"), Exception("in a fit")):
        error = raised_from(error, wrapper)
    assert is_out_of_memory(error)


def test_an_error_while_one_was_handled_is_not():
    def handle():
        try:
            raise RuntimeError("CUDA out of memory.")
        except RuntimeError:
            raise KeyError("a defect of the handler")  # noqa: B904

    with pytest.raises(KeyError, match="of the handler") as caught:
        handle()
    assert is_out_of_memory(caught.value.__context__)
    assert not is_out_of_memory(caught.value)


def test_a_circle_of_causes_ends():
    first, second = RuntimeError("a"), RuntimeError("b")
    raised_from(first, second)
    raised_from(second, first)
    assert not is_out_of_memory(first)


def test_the_exception_is_left_as_it_was():
    error = RuntimeError("CUDA out of memory.")
    assert is_out_of_memory(error)
    assert error.args == ("CUDA out of memory.",)
    assert error.__cause__ is None
    assert error.__traceback__ is None


def test_a_sample_that_is_too_large_is_an_out_of_memory_error():
    error = SampleTooLargeError("Not even one")
    assert isinstance(error, torch.OutOfMemoryError)
    assert is_out_of_memory(error)
    assert str(error) == "Not even one"
