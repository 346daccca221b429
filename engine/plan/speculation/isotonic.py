"""never_decreasing: the monotone curve nearest to some measurements."""

from __future__ import annotations

from collections.abc import Iterable


def never_decreasing(weighted: Iterable[tuple[float, float]]) -> list[float]:
    """The nearest values by weighted squares that never decrease: violators are pooled (Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, length
    for value, weight in weighted:
        total, length = value * weight, 1
        while pools and pools[-1][0] * weight > total * pools[-1][1]:
            total_before, weight_before, length_before = pools.pop()
            total, weight, length = total_before + total, weight_before + weight, length_before + length
        pools.append((total, weight, length))
    return [total / weight for total, weight, length in pools for _ in range(length)]
