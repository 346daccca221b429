"""Which failures mean that there was no room."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.compute.runner.device import failures_named, in_stream, is_out_of_memory
from engine.errors import DeviceLost, OutOfDeviceMemory


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
    with pytest.raises(OutOfDeviceMemory if is_out_of_memory(error) else RuntimeError), failures_named():
        raise error
    assert bool(emptied) == (is_emptied and has_cuda)


def test_a_thread_that_enters_a_stream_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch leaves a stream: for the device that was current before, which it sets up for that."""
    current, seen = [0], []

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        before, current[0] = current[0], entered.device.index
        yield
        current[0] = before
        seen.append(before)

    monkeypatch.setattr("torch.cuda.set_device", lambda device: current.__setitem__(0, device.index))
    monkeypatch.setattr("torch.cuda.stream", stream)
    with in_stream(SimpleNamespace(device=torch.device("cuda", 1))):  # type: ignore[arg-type]
        assert current == [1]
    assert current == seen == [1]
    with in_stream(None):
        assert current == [1]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later",
        "CUDA error: device-side assert triggered",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_a_lost_device_is_named_with_its_first_line(words: str) -> None:
    with pytest.raises(DeviceLost) as raised, failures_named():
        raise RuntimeError(words)
    assert str(raised.value) == f"The device is lost: {words.splitlines()[0]}."


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: invalid argument"), ValueError("misaligned address"), RuntimeError("boom")],
)
def test_what_leaves_the_device_as_it_is_comes_through(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), failures_named():
        raise error
