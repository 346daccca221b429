"""MemoryGauge: how full a device is, and how much of it some work takes while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class MemoryGauge(Protocol):
    """What tells of a device's memory. For the thread that runs the model."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that can still be taken, and all there are; what torch holds but does not use is free."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Do `work`; the most bytes that were in use meanwhile beyond those before. Raises what it raises."""
        ...


class CudaMemoryGauge:
    """The memory of a GPU, by its driver and by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See MemoryGauge."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):  # which empties the cache of all, and is made current for that
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def peak(self, work: Callable[[], None]) -> int:
        """See MemoryGauge. What kernels take by themselves, once they are loaded, shows in what is free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def gauge_of(device: torch.device) -> MemoryGauge | None:
    """That of `device`; None for the CPU, whose memory is the system's to give."""
    return CudaMemoryGauge(device) if device.type == "cuda" else None
