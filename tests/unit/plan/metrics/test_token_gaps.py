"""What a token took: shared among those that came together, and the time of decoding in all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.plan.metrics.histogram import Histogram, TokenGaps

BOUNDS = tuple(i / 64 for i in range(1, 64))


def make_gaps() -> tuple[TokenGaps, Histogram]:
    histogram = Histogram(BOUNDS)
    return TokenGaps(histogram), histogram


def counts_of(histogram: Histogram) -> dict[float, int]:
    return {bound: count for bound, count in zip(BOUNDS, histogram.counts, strict=False) if count}


def test_tokens_of_one_step_share_its_gap() -> None:
    gaps, histogram = make_gaps()
    gaps.end_step(1.0)  # a first token came in it
    gaps.add(1.0, 1.25)
    gaps.add(1.25, 1.25)
    gaps.add(1.25, 1.25)
    gaps.add(1.25, 1.25)
    gaps.end_step(1.25)
    assert counts_of(histogram) == {1 / 16: 4}
    assert histogram.sum == pytest.approx(0.25)


def test_requests_with_a_token_in_each_step_are_counted_together_and_others_for_themselves() -> None:
    gaps, histogram = make_gaps()
    gaps.end_step(1.0)
    for _ in range(3):
        gaps.add(1.0, 1.125)
    gaps.add(0.5, 1.125)  # it missed some steps
    gaps.add(1.125, 1.125)
    gaps.end_step(1.125)
    assert counts_of(histogram) == {1 / 8: 3, 5 / 16: 2}
    assert histogram.sum == pytest.approx(3 * 0.125 + 0.625)


def test_a_step_without_a_token_counts_for_nothing() -> None:
    gaps, histogram = make_gaps()
    for now in (1.0, 2.0, 2.5):
        gaps.end_step(now)
    assert histogram.count == 0


def test_the_sum_is_the_time_of_decoding_and_the_count_its_tokens() -> None:
    draw = random.Random(3)
    gaps, histogram = make_gaps()
    last: dict[int, float] = {}
    first: dict[int, float] = {}
    tokens: Counter[int] = Counter()
    for step in range(200):
        now = step * 0.01 + draw.random() * 0.005
        for request in draw.sample(range(8), draw.randrange(9)):
            for _ in range(draw.choice((1, 1, 3))):
                if request in last:
                    gaps.add(last[request], now)
                    tokens[request] += 1
                first.setdefault(request, now)
                last[request] = now
        gaps.end_step(now)
    assert histogram.count == tokens.total()
    assert histogram.sum == pytest.approx(sum(last[request] - first[request] for request in last))
