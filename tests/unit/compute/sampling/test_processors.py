"""The support after each filter: borders, ties, extremes, and equality with a plain float64 reading."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from engine.compute.sampling.processors import compact
from tests.support.sampling_reference import (
    MISTAKES,
    Row,
    adjusted,
    border_margin,
    counted,
    dense_probs,
    engine_probs,
    reference_probs,
    sample,
    support_of,
)

# Probabilities .5 .25 .125 .0625 .0625 for tokens 2 0 3 1 4.
HALVES = torch.tensor([[0.25, 0.0625, 0.5, 0.125, 0.0625]]).log()


def kept(logits: torch.Tensor, row: Row) -> set[int]:
    """The tokens with any probability."""
    return set(np.flatnonzero(dense_probs(support_of(logits, [row]), logits.shape[1])[0]).tolist())


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        (Row(), {0, 1, 2, 3, 4}),
        (Row(top_k=1), {2}),
        (Row(top_k=3), {2, 0, 3}),
        (Row(top_k=4), {2, 0, 3, 1}),  # 1 and 4 are equal: the lower id stays
        (Row(top_k=5), {0, 1, 2, 3, 4}),
        (Row(top_k=1000), {0, 1, 2, 3, 4}),
        (Row(top_k=-1), {0, 1, 2, 3, 4}),
        (Row(top_p=0.0), {2}),
        (Row(top_p=0.49), {2}),
        (Row(top_p=0.51), {2, 0}),
        (Row(top_p=0.76), {2, 0, 3}),
        (Row(top_p=0.88), {2, 0, 3, 1}),
        (Row(top_p=0.95), {0, 1, 2, 3, 4}),
        (Row(top_p=1.0), {0, 1, 2, 3, 4}),
        (Row(top_k=2, top_p=0.66), {2}),  # of the two left, token 2 has 2/3
        (Row(top_k=2, top_p=0.67), {2, 0}),
        (Row(min_p=0.26), {2, 0}),
        (Row(min_p=1.0), {2}),
        (Row(top_p=0.95, min_p=0.2), {2, 0, 3}),
        (Row(temperature=2.0, top_p=0.58), {2, 0}),  # .343 .243 .172 ...: temperature comes first
        (Row(temperature=2.0, min_p=0.26), {2, 0, 3, 1, 4}),
        (Row(temperature=1e-6), {2}),
        (Row(temperature=1e-40, top_p=0.9), {2}),
    ],
)
def test_each_filter_keeps(row: Row, tokens: set[int]) -> None:
    assert kept(HALVES, row) == tokens


def test_ties_go_to_the_lower_ids() -> None:
    equal = torch.zeros(1, 8)
    assert kept(equal, Row(top_k=3)) == {0, 1, 2}
    assert kept(equal, Row(top_p=0.5)) == {0, 1, 2, 3}  # eighths are exact
    assert kept(equal, Row(top_p=0.51)) == {0, 1, 2, 3, 4}
    assert kept(equal, Row(min_p=1.0)) == set(range(8))
    two_levels = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    assert kept(two_levels, Row(top_k=3)) == {1, 3, 0}


def test_impossible_tokens_never_enter_and_do_not_count_in_the_mass() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0]])
    assert kept(logits, Row(top_k=3)) == {1, 3}
    assert kept(logits, Row(top_p=0.5)) == {1}
    assert kept(logits, Row(top_p=0.999)) == {1, 3}
    assert support_of(logits, [Row(top_k=3)]).token_ids.shape == (1, 2)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e30])
def test_no_overflow_at_any_temperature_or_size(temperature: float, size: float) -> None:
    logits = torch.tensor([[-1.0, 3.0, 2.999, 0.0, 1.0]]) * size
    probs = dense_probs(support_of(logits, [Row(temperature=temperature, top_p=0.99999)]), 5)[0]
    assert np.isfinite(probs).all()
    assert probs.sum() == pytest.approx(1)
    assert probs.argmax() == 1
    assert sample(logits, [Row(temperature=1e-30, seed=seed) for seed in range(1)]) == [1]


def test_rows_keep_their_own_filters_in_one_batch() -> None:
    rows = [Row(), Row(top_k=2), Row(top_p=0.6), Row(min_p=0.2), Row(top_k=3, top_p=0.7, min_p=0.3)]
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    together = dense_probs(support_of(logits, rows), 40)
    for index, row in enumerate(rows):
        alone = dense_probs(support_of(logits[index : index + 1], [row]), 40)[0]
        assert np.array_equal(together[index] > 0, alone > 0)
        assert together[index] == pytest.approx(alone, abs=1e-6)


GRID = [
    Row(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 3, 9), (0.2, 0.7, 0.95, 1.0), (0.0, 0.05, 0.4)
    )
]


@pytest.mark.parametrize("vocab_size", [5, 12, 700])
def test_equals_the_float64_reading(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(GRID), vocab_size, generator=generator) * 3
    found = dense_probs(support_of(logits, GRID), vocab_size)
    checked = 0
    for index, row in enumerate(GRID):
        expected = logits[index].double().numpy()
        if border_margin(expected, row) > 1e-5:
            assert found[index] == pytest.approx(reference_probs(expected, row), abs=1e-6), row
            checked += 1
    assert checked > 0.95 * len(GRID)


def test_a_wide_flat_support_is_exact_too() -> None:
    logits = torch.randn(2, 49152, generator=torch.Generator().manual_seed(5))
    rows = [Row(temperature=2.0, top_p=0.97), Row(temperature=2.0, top_k=30000, top_p=0.9)]
    found = dense_probs(support_of(logits, rows), 49152)
    for index, row in enumerate(rows):
        expected = reference_probs(logits[index].double().numpy(), row)
        assert abs(int((found[index] > 0).sum()) - int((expected > 0).sum())) <= 1
        assert np.abs(found[index] - expected).sum() < 1e-4


def all_at_once(count: int = 150, vocab_size: int = 10) -> tuple[torch.Tensor, list[Row]]:
    """Rows that use every parameter together, and their logits."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(count):
        row = Row(
            temperature=float(rng.choice([0.6, 1.0, 1.5])),
            top_k=int(rng.choice([0, 3, 5])),
            top_p=float(rng.choice([0.6, 0.9, 1.0])),
            min_p=float(rng.choice([0.0, 0.1, 0.3])),
        )
        rows.append(
            adjusted(
                row,
                logit_bias=((int(rng.integers(vocab_size)), 1.5),),
                banned_token_ids=(9,),
                allowed_token_ids=(0, 1, 2, 3, 4, 5, 6, 7, 9),
                repetition_penalty=float(rng.choice([0.7, 1.4])),
                presence_penalty=float(rng.choice([-0.5, 0.8])),
                frequency_penalty=float(rng.choice([-0.5, 0.8])),
                history=counted(
                    rng.integers(vocab_size, size=4).tolist(), rng.integers(vocab_size, size=6).tolist()
                ),
            )
        )
    return torch.from_numpy(rng.normal(0, 1.5, size=(count, vocab_size))).float(), rows


def distances(mistake: str | None) -> list[float]:
    """How far each row's probabilities are from the float64 reading, made with one mistake or none."""
    logits, rows = all_at_once()
    found = engine_probs(logits, rows)
    sure = [i for i, row in enumerate(rows) if border_margin(logits[i].double().numpy(), row) > 1e-5]
    assert len(sure) > 0.95 * len(rows)
    expected = (reference_probs(logits[i].double().numpy(), rows[i], mistake) for i in sure)
    return [float(np.abs(found[i] - probs).max()) for i, probs in zip(sure, expected, strict=True)]


def test_all_parameters_together_equal_the_float64_reading() -> None:
    assert max(distances(None)) < 1e-6


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_finds_each_mistake(mistake: str) -> None:
    """Negative control: against a reading with one mistake, the same comparison fails clearly."""
    assert sum(distance > 0.02 for distance in distances(mistake)) >= 3


def test_compact_gives_ascending_columns_and_marks_padding() -> None:
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    columns, valid = compact(mask)
    assert columns.tolist() == [[1, 2], [0, 0], [0, 2]]
    assert valid.tolist() == [[True, True], [False, False], [True, True]]
    assert compact(torch.zeros(2, 3, dtype=torch.bool))[0].tolist() == [[0], [0]]
