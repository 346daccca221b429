"""Which failures mean that there was no room."""

import pytest
import torch

from engine.compute.runner.device import is_out_of_memory, out_of_memory_named
from engine.errors import OutOfDeviceMemory


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


@pytest.mark.parametrize(
    ("error", "is_emptied"),
    [
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("boom"), False),
    ],
)
@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_driver_without_memory_gets_back_what_torch_keeps_for_later(
    has_cuda: bool, error: Exception, is_emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: has_cuda)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    with pytest.raises(OutOfDeviceMemory if is_out_of_memory(error) else RuntimeError), out_of_memory_named():
        raise error
    assert bool(emptied) == (is_emptied and has_cuda)
