"""DeviceTrace: what a device did and when, by its own trace."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Work(NamedTuple):
    """A kernel or a copy, from and to microseconds of the device's clock."""

    name: str
    begin: float
    end: float


class DeviceTrace:
    """The device's work while this was open; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.works: list[Work] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Trace what the device does."""
        if self._device.type != "cuda":
            yield
            return
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            yield
            torch.cuda.synchronize(self._device)
        self.works = [
            Work(event.name, event.time_range.start, event.time_range.end)
            for event in trace.events() or ()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]

    def by_kernel(self, steps: int, shown: int) -> str:
        """µs and number of each kernel in one of the `steps` that were traced, the `shown` longest first."""
        spent: Counter[str] = Counter()
        for work in self.works:
            spent[work.name] += round(1e3 * (work.end - work.begin))  # ns: a Counter's values are whole
        numbers = Counter(work.name for work in self.works)
        kernels = (
            f"{name[:70]} {time / 1e3 / steps:.0f} µs ×{numbers[name] / steps:.0f}"
            for name, time in spent.most_common(shown)
        )
        whole = f"{spent.total() / 1e3 / steps:.0f} µs in {len(self.works) / steps:.0f} kernels"
        return f"{whole}: {'; '.join(kernels)}"
