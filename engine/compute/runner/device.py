"""What a runner asks of the device besides computing: the time, on its own clock, and what a failure was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from engine.errors import DeviceLost, OutOfDeviceMemory

Mark = float | torch.cuda.Event


def make_current(device: torch.device) -> None:
    """Have the calling thread's work go to `device` where none is named: kernels, streams, graphs.

    Each thread begins with GPU 0. One that enters a stream by `in_stream` need not call this.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream behind all that is queued by now, for work beside the target's; None on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def idle_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream that waits for nothing, to look at what the host knows to be there; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def in_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Have what the thread queues meanwhile go into `stream`, whose device is current then, and from then on.

    To make the one before current again, GPU 0 in a new thread, would set that one up: hundreds of megabytes
    of it, or an error where others have them. None is the stream that is current anyway.
    """
    if stream is None:
        return nullcontext()
    make_current(stream.device)
    return torch.cuda.stream(stream)


def gpu_has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU computes bfloat16 itself, rather than by way of other numbers."""
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def mark(device: torch.device) -> Mark:
    """Now, on the clock of the device."""
    if device.type != "cuda":
        return time.perf_counter()
    # Blocking, so that who waits for it sleeps: other threads have work for the core.
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def queue_behind(moment: Mark, device: torch.device) -> None:
    """Have what is queued next wait for the mark, which may be another stream's; the host does not."""
    if not isinstance(moment, float):
        torch.cuda.current_stream(device).wait_event(moment)


def wait_for(moment: Mark) -> None:
    """Sleep until the device has reached it. Raises what has failed there."""
    if not isinstance(moment, float):
        moment.synchronize()


def seconds_between(begin: Mark, end: Mark) -> float:
    """The seconds from one mark to a later one; waits until the device has reached it."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


# Of errors that have no type of their own: the CPU's allocator, the driver, by torch and by Triton, and the
# libraries upon it. Triton loads a kernel where it is first launched, which takes memory of the driver's.
_SIGNS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# Of faults after which CUDA's runtime answers all calls of the process with the same error, as its
# documentation of error types says.
_SIGNS_OF_LOSS = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "device-side assert triggered",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
)


@contextmanager
def failures_named() -> Iterator[None]:
    """Have a pass that runs out of memory raise OutOfDeviceMemory, one that loses its device DeviceLost.

    Other errors come through. Where it was the driver that had no memory, it gets back what torch keeps for
    later: the next try would find no more of it. Torch's allocator has done that by itself before it says so.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_loss(error):
            raise DeviceLost(f"The device is lost: {str(error).splitlines()[0]}.") from error
        if not is_out_of_memory(error):
            raise
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if has_cuda and not isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        raise OutOfDeviceMemory("The forward pass ran out of memory.") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device, or the host, had no room."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def is_loss(error: Exception) -> bool:
    """Whether the device takes no more work of this process."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_LOSS)
