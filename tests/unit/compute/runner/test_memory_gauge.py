"""What a gauge asks of the driver and of torch's allocator, and of which device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine.compute.runner.memory_gauge import CudaMemoryGauge, gauge_of

GPU = torch.device("cuda", 1)


class FakeMemory:
    """Stands for torch.cuda on GPU 1: 100 bytes, of which torch holds some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated, self.peak, self.cached = 10, 10, 30
        self.asked: list[str] = []
        for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "mem_get_info"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "device", self.device)

    def device(self, device: torch.device) -> Any:
        assert device == GPU
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.asked.append("wait")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        assert device == GPU
        self.peak = self.allocated

    def memory_allocated(self, device: torch.device) -> int:
        assert device == GPU
        return self.allocated

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == GPU
        return 100 - self.allocated - self.cached, 100

    def empty_cache(self) -> None:
        self.cached = 0

    def take(self, count: int) -> None:
        self.allocated += count
        self.peak = max(self.peak, self.allocated)


def test_what_torch_only_holds_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMemory(monkeypatch)
    assert CudaMemoryGauge(GPU).free_and_total() == (90, 100)


def test_a_peak_is_what_was_taken_at_once_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch)
    memory.take(50)
    memory.take(-50)  # an earlier peak, which does not count

    def work() -> None:
        for count in (7, 5, -9, 4, -7):
            memory.take(count)
            memory.asked.append("work")

    assert CudaMemoryGauge(GPU).peak(work) == 12
    assert memory.asked[0] == memory.asked[-1] == "wait", "the device has done all of it, and nothing else"


def test_a_cpu_has_no_gauge() -> None:
    assert gauge_of(torch.device("cpu")) is None
    assert isinstance(gauge_of(GPU), CudaMemoryGauge)
