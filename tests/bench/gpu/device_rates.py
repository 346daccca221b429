"""What the device reaches at best: bytes a second of a plain copy, operations a second of a large product."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from engine.compute.runner.device import mark, seconds_between
from tests.bench.gpu.sizes import Sizes
from tests.bench.report import Section

_RUNS = 5


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """What one call of `work` takes, by the device's own clock, in several runs."""
    work()
    runs = []
    for _ in range(_RUNS):
        begin = mark(device)
        for _ in range(repeats):
            work()
        runs.append(seconds_between(begin, mark(device)) / repeats)
    return runs


def copy_rate(sizes: Sizes, device: torch.device, section: Section) -> float:
    """Bytes a second, counting those read and those written; noted in `section`."""
    source = torch.randint(0, 256, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs = seconds_of(lambda: target.copy_(source), device, sizes.repeats)
    rates = [2 * source.numel() / seconds for seconds in runs]
    section.add("a plain copy", "moved", "GB/s", [rate / 1e9 for rate in rates])
    return statistics.median(rates)


def product_rate(sizes: Sizes, device: torch.device, section: Section) -> float:
    """Operations a second of a product of two square matrices of random numbers; noted in `section`."""
    shape = (sizes.product, sizes.product)
    left, right = (torch.randn(shape, dtype=sizes.dtype, device=device) for _ in range(2))
    runs = seconds_of(lambda: left @ right, device, sizes.repeats)
    rates = [2 * sizes.product**3 / seconds for seconds in runs]
    section.add(f"a product of {sizes.product}", "rate", "TFLOP/s", [rate / 1e12 for rate in rates])
    return statistics.median(rates)
