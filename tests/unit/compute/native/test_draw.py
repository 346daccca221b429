"""Draws by compiled code: the tokens that tensor operations draw, whoever is beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.native.drawing import NativeDraw
from engine.compute.sampling.sampler import Sampler
from tests.support.native import compiled_draw
from tests.support.sampling_reference import CPU, Row, adjusted, inputs_of

TEMPERATURES, TOP_KS = (0.0, 0.3, 1.0, 2.0), (0, 1, 2, 40, 1000, 60_000)
TOP_PS, MIN_PS = (1.0, 0.9, 0.5, 0.0, 0.99999), (0.0, 0.0, 0.05, 1.0)


@pytest.fixture
def draw() -> NativeDraw:
    return compiled_draw()


def many_rows(rng: np.random.Generator, number: int) -> list[Row]:
    """Rows of every mixture of parameters, seeds and positions."""
    return [
        Row(
            temperature=float(rng.choice(TEMPERATURES)),
            top_k=int(rng.choice(TOP_KS)),
            top_p=float(rng.choice(TOP_PS)),
            min_p=float(rng.choice(MIN_PS)),
            seed=int(rng.integers(-(2**62), 2**62)),
            position=int(rng.integers(1000)),
        )
        for _ in range(number)
    ]


def test_the_draw_is_the_one_that_tensor_operations_make(draw: NativeDraw) -> None:
    rng, noise = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for vocab in (1, 2, 17, 64, 65, 3000, 20_001):
        plain, native = Sampler(vocab, CPU), Sampler(vocab, CPU, draw)
        for scale in (0.01, 1.0, 5.0):
            rows = many_rows(rng, 24)
            logits = torch.randn(24, vocab, generator=noise) * scale
            for given in (logits, logits.bfloat16()):
                assert native.sample(given, inputs_of(rows)) == plain.sample(given, inputs_of(rows))


def test_among_equals_the_lower_ids_are_kept_and_what_is_impossible_is_never_drawn(draw: NativeDraw) -> None:
    rng = np.random.default_rng(1)
    logits = torch.randint(-3, 3, (48, 3000), generator=torch.Generator().manual_seed(1)).float()
    logits[:, rng.integers(0, 3000, 900)] = -torch.inf
    rows = many_rows(rng, 48)
    assert Sampler(3000, CPU, draw).sample(logits, inputs_of(rows)) == Sampler(3000, CPU).sample(
        logits, inputs_of(rows)
    )


def test_adjusted_rows_are_drawn_from_their_adjusted_logits(draw: NativeDraw) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = [
        Row(temperature=1.0),
        adjusted(Row(temperature=1.0, top_p=0.9), allowed_token_ids=(5, 9, 2999)),
        Row(temperature=0.5, top_k=3),
        adjusted(Row(temperature=0.7), logit_bias=((8, 100.0),)),
    ]
    found = Sampler(3000, CPU, draw).sample(logits, inputs_of(rows))
    assert found == Sampler(3000, CPU).sample(logits, inputs_of(rows))
    assert found.token_ids[1] in (5, 9, 2999)
    assert found.token_ids[3] == 8


def test_a_row_is_the_same_alone_in_a_batch_and_on_any_number_of_threads(draw: NativeDraw) -> None:
    rows = many_rows(np.random.default_rng(3), 16)
    logits = torch.randn(16, 3000, generator=torch.Generator().manual_seed(3)).bfloat16()
    sampler = Sampler(3000, CPU, draw)
    together = sampler.sample(logits, inputs_of(rows)).token_ids
    assert [
        sampler.sample(logits[i : i + 1], inputs_of([rows[i]])).token_ids[0] for i in range(16)
    ] == together
    for number in (2, 3, 1):
        draw.team.resize(number)
        assert sampler.sample(logits, inputs_of(rows)).token_ids == together


def test_a_row_that_is_not_finite_ends_alone(draw: NativeDraw) -> None:
    logits = torch.randn(3, 100)
    logits[1, 7] = torch.nan
    found = Sampler(100, CPU, draw).sample(logits, inputs_of([Row(temperature=1.0, top_p=0.9)] * 3))
    assert list(found.row_errors or ()) == [1]


def test_the_best_of_a_row_is_the_first_of_equals_or_none_where_the_row_is_not_finite(
    draw: NativeDraw,
) -> None:
    logits = torch.zeros(5, 70)
    logits[1, [40, 69]] = 3.0
    logits[2, 5] = torch.nan
    logits[3, 68] = torch.inf
    logits[4] = -torch.inf
    assert draw.best(logits).tolist() == [0, 40, -1, -1, -1]
    assert draw.best(logits.bfloat16()).tolist() == [0, 40, -1, -1, -1]
    logits[4, 69] = -5.0
    assert draw.best(logits[4:]).tolist() == [69]
    assert draw.best(logits[:0]).tolist() == []
