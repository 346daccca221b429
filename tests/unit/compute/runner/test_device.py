"""Which failures mean that there was no room."""

import pytest
import torch

from engine.compute.runner.device import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_no_room(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("boom"),
        ValueError("DefaultCPUAllocator"),
        RuntimeError("CUDA error: device-side"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
    ],
)
def test_another_failure(error: Exception) -> None:
    assert not is_out_of_memory(error)
