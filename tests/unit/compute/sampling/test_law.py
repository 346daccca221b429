"""The law of the draw: chi-square of many draws against the float64 reading, with mistakes it must reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.sampling import noise, processors
from tests.support.sampling_reference import (
    Row,
    adjusted,
    chi_square_p,
    chi_square_tail,
    counted,
    reference_probs,
    sample,
)

VOCAB = 12
DRAWS = 6_000
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
Change = Callable[[Row], Row]

CASES = {
    "temperature 1": Row(),
    "temperature 0.5": Row(temperature=0.5),
    "temperature 3": Row(temperature=3.0),
    "top-k": Row(top_k=4),
    "top-p": Row(top_p=0.8),
    "min-p": Row(min_p=0.15),
    "all filters": Row(temperature=1.4, top_k=9, top_p=0.9, min_p=0.05),
    "penalties": adjusted(
        Row(temperature=0.9),
        repetition_penalty=1.5,
        presence_penalty=0.6,
        frequency_penalty=1.2,
        history=counted((0, 1, 2, 3), (3, 4, 4, 4, 5)),
    ),
    "bias and bans": adjusted(
        Row(top_p=0.95),
        logit_bias=((2, 1.0), (7, -1.0)),
        banned_token_ids=(1,),
        allowed_token_ids=tuple(range(10)),
    ),
}


def by_position(row: Row) -> list[Row]:
    return [replace(row, seed=42, position=position) for position in range(DRAWS)]


def by_seed(row: Row) -> list[Row]:
    return [replace(row, seed=seed, position=17) for seed in range(DRAWS)]


def draws(rows: list[Row]) -> list[int]:
    return sample(LOGITS.expand(len(rows), VOCAB), rows)


def law_p(rows: list[Row], truth: Row) -> float:
    return chi_square_p(draws(rows), reference_probs(LOGITS[0].double().numpy(), truth))


def pairs_p(tokens: list[int], truth: Row) -> float:
    """Chi-square of (token, next token) in disjoint pairs against independent draws."""
    probs = reference_probs(LOGITS[0].double().numpy(), truth)
    pairs = [first * VOCAB + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
    return chi_square_p(pairs, np.outer(probs, probs).ravel())


@pytest.mark.by_default
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spread", [by_position, by_seed])
def test_draws_follow_the_law(name: str, spread: Callable[[Row], list[Row]]) -> None:
    assert law_p(spread(CASES[name]), CASES[name]) > 1e-3


def test_a_large_vocabulary_follows_the_law_too() -> None:
    """2,000 tokens of less than 1 % each: nearly all draws are won from the noise's tail."""
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1))
    tokens = sample(logits.expand(DRAWS, -1), by_position(Row()))
    probs = reference_probs(logits[0].double().numpy(), Row())
    order = np.argsort(probs)
    groups = np.empty(2000, dtype=np.int64)
    groups[order] = np.arange(2000) // 50
    assert chi_square_p(groups[tokens].tolist(), probs[order].reshape(40, 50).sum(axis=1)) > 1e-3


@pytest.mark.parametrize("spread", [by_position, by_seed])
def test_neighbouring_draws_are_independent(spread: Callable[[Row], list[Row]]) -> None:
    assert pairs_p(draws(spread(Row())), Row()) > 1e-3


def test_two_logit_rows_under_one_noise_agree_as_often_as_gumbel_coupling_says() -> None:
    """P(equal) = sum over tokens of 1 / sum_j max(p_j / p_i, q_j / q_i): what speculation will live on."""
    other = LOGITS + torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 0.5
    p, q = (reference_probs(x[0].double().numpy(), Row()) for x in (LOGITS, other))
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(VOCAB))
    rows = by_position(Row())
    equal = np.mean(np.array(draws(rows)) == np.array(sample(other.expand(DRAWS, VOCAB), rows)))
    assert equal == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / DRAWS))


# Negative controls: each mistake must be rejected by the same tests at the same number of draws.


def test_rejects_a_seed_that_is_ignored() -> None:
    assert law_p([replace(row, seed=0) for row in by_seed(Row())], Row()) < 1e-6


def test_rejects_noise_that_is_reused_across_positions() -> None:
    assert law_p([replace(row, position=0) for row in by_position(Row())], Row()) < 1e-6
    # Reused for two positions only, the marginal law is still right: the pairs are not.
    twice = [replace(row, position=row.position // 2) for row in by_position(Row())]
    assert pairs_p(draws(twice), Row()) < 1e-6


def test_rejects_noise_that_is_the_same_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    real = noise.noise_bits

    def one_for_all(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return real(keys, torch.zeros_like(token_ids))

    monkeypatch.setattr(processors, "noise_bits", one_for_all)
    assert law_p(by_position(Row(top_k=11)), Row(top_k=11)) < 1e-6


def test_rejects_noise_of_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def logistic(bits: torch.Tensor) -> torch.Tensor:
        return torch.logit((bits.double() + 2**31 + 0.5) / 2**32)

    monkeypatch.setattr(processors, "gumbel_of", logistic)
    assert law_p(by_position(Row(top_k=11)), Row(top_k=11)) < 1e-6


def test_rejects_the_argmax_and_the_uniform_draw() -> None:
    assert law_p([replace(row, temperature=0.0) for row in by_position(Row())], Row()) < 1e-6
    assert law_p([replace(row, temperature=1e6) for row in by_position(Row())], Row()) < 1e-6


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        (
            "penalties",
            lambda row: adjusted(row, history=counted((), (0, 1, 2, 3, 3, 4, 4, 4, 5))),
        ),
        ("penalties", lambda row: adjusted(row, history=counted((), (3, 4, 4, 4, 5)))),
        ("penalties", lambda row: adjusted(row, history=counted((0, 1, 2, 3), (3, 4, 5)))),
        ("penalties", lambda row: adjusted(row, repetition_penalty=1.0)),
        ("top-p", lambda row: replace(row, top_p=0.7)),
        ("top-k", lambda row: replace(row, top_k=5)),
        ("min-p", lambda row: replace(row, min_p=0.3)),
        ("all filters", lambda row: replace(row, temperature=1.0)),
        ("bias and bans", lambda row: adjusted(row, logit_bias=((2, 1.0),))),
    ],
)
def test_rejects_a_row_processed_differently(name: str, mistake: Change) -> None:
    assert law_p(by_position(mistake(CASES[name])), CASES[name]) < 1e-6


def test_the_chi_square_tail_is_right() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, rel=1e-5)
    assert chi_square_tail(18.307038, 10) == pytest.approx(0.05, rel=1e-5)
    assert chi_square_p([0] * 10, np.array([0.0, 1.0])) == 0.0
