"""The whole sampler: shortcuts change nothing, rows do not touch each other, a failure stays in its row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.compute.sampling.adjustments import apply_adjustments
from engine.compute.sampling.sampler import Sampler
from tests.support.sampling_reference import CPU, Row, adjusted, counted, dense_draw, inputs_of, sample

VOCAB = 3000
PLAIN = [
    Row(temperature=0),
    Row(temperature=0.7),
    Row(temperature=1.0),
    Row(temperature=1.5, min_p=0.01),
    Row(temperature=0.8, top_k=40),
    Row(temperature=1.0, top_p=0.9),
    Row(temperature=1.2, top_k=100, top_p=0.95, min_p=0.02),
    Row(temperature=2.0, top_p=0.99),
]
ADJUSTED = [
    adjusted(Row(temperature=0), banned_token_ids=(1, 2, 3)),
    adjusted(Row(temperature=0.9, top_p=0.9), logit_bias=((5, 4.0), (6, -100.0))),
    adjusted(Row(temperature=1.0), allowed_token_ids=tuple(range(0, VOCAB, 7))),
    adjusted(
        Row(temperature=0.7, top_k=50),
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        history=counted(range(50), (1, 1, 70, 2999)),
    ),
]


def mixed_rows() -> list[Row]:
    return [
        Row(row.temperature, row.top_k, row.top_p, row.min_p, 100 + i, 7 * i, i % 3 - 1, row.adjustment)
        for i, row in enumerate([*PLAIN, *ADJUSTED, *PLAIN[:4]])
    ]


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert sample(logits, [Row(temperature=0)] * 2) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_shortcut_equals_the_long_way(dtype: torch.dtype) -> None:
    logits = logits_of(16).to(dtype)
    short = sample(logits, [Row(temperature=0)] * 16)
    with_logprobs = sample(logits, [Row(temperature=0, num_logprobs=0)] * 16)
    # A penalty on no token changes nothing but goes through the adjusted copy.
    through_adjustments = sample(logits, [adjusted(Row(temperature=0), presence_penalty=1.0)] * 16)
    next_to_sampling = sample(logits, [Row(temperature=0)] * 15 + [Row()])[:15]
    assert short == logits.argmax(dim=1).tolist() == with_logprobs == through_adjustments
    assert next_to_sampling == short[:15]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_any_order_of_a_batch(dtype: torch.dtype) -> None:
    rows, logits = mixed_rows(), logits_of(16).to(dtype)
    result = Sampler(VOCAB, CPU).sample(logits, inputs_of(rows))
    assert result.row_errors is None and result.logprobs is not None
    for index, row in enumerate(rows):
        alone = Sampler(VOCAB, CPU).sample(logits[index : index + 1], inputs_of([row]))
        assert alone.token_ids == [result.token_ids[index]]
        assert (alone.logprobs or (None,))[0] == result.logprobs[index]
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(16)
        shuffled = Sampler(VOCAB, CPU).sample(logits[order], inputs_of([rows[i] for i in order]))
        assert shuffled.token_ids == [result.token_ids[i] for i in order]
        assert shuffled.logprobs == tuple(result.logprobs[i] for i in order)


def test_groups_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, logits = mixed_rows(), logits_of(16)
    whole = sample(logits, rows)
    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 2 * 4096)
    assert sample(logits, rows) == whole


def test_threads_change_nothing() -> None:
    rows, logits = [Row(top_p=0.9, seed=1), Row(seed=2)], logits_of(2, vocab=120_000)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append([sample(logits, rows), sample(logits[:1], rows[:1]) + sample(logits[1:], rows[1:])])
    finally:
        torch.set_num_threads(before)
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 30.0])
def test_pruned_draw_equals_the_dense_one(scale: float) -> None:
    rows = [Row(temperature=(0.2, 1.0, 3.0)[seed % 3], seed=seed, position=seed) for seed in range(24)]
    logits = logits_of(24, seed=9) / 3 * scale
    assert sample(logits, rows) == dense_draw(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.5])
def test_adjusted_rows_choose_from_their_adjusted_logits(temperature: float) -> None:
    logits = logits_of(12)
    ranked = logits.argsort(dim=1, descending=True).tolist()
    changes = [
        lambda row, best: adjusted(row, banned_token_ids=tuple(best[:30])),
        lambda row, best: adjusted(row, logit_bias=((best[500], 40.0),)),
        lambda row, best: adjusted(row, allowed_token_ids=tuple(best[1000:1020])),
        lambda row, best: adjusted(row, repetition_penalty=3.0, history=counted(best[:50])),
    ]
    plain = [Row(temperature=temperature, seed=seed) for seed in range(12)]
    rows = [changes[i % 4](row, ranked[i]) for i, row in enumerate(plain)]
    changed = logits.clone()
    assert apply_adjustments(changed, [row.adjustment for row in rows]) == {}
    expected = dense_draw(changed, plain) if temperature else changed.argmax(dim=1).tolist()
    assert sample(logits, rows) == expected
    assert expected != sample(logits, plain)


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, VOCAB).repeat(50, 1)
    by_seed = sample(logits, [Row(seed=seed) for seed in range(50)])
    by_position = sample(logits, [Row(position=position) for position in range(50)])
    assert len(set(by_seed)) > 45 and len(set(by_position)) > 45
    assert (
        sample(logits, [Row(seed=3, position=4)] * 50)
        == [sample(logits[:1], [Row(seed=3, position=4)])[0]] * 50
    )


def test_top_k_1_is_greedy_under_ties() -> None:
    logits = (logits_of(40) * 2).round().bfloat16()
    greedy = sample(logits, [Row(temperature=0)] * 40)
    assert sample(logits, [Row(temperature=1.5, top_k=1, seed=seed) for seed in range(40)]) == greedy


def test_the_logits_are_left_as_they_were() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(16).to(dtype)
        before = logits.clone()
        sample(logits, mixed_rows())
        assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [mixed_rows(), [Row(temperature=0)] * 16])
def test_a_non_finite_row_ends_alone(value: float, rows: list[Row]) -> None:
    logits = logits_of(16)
    sound = Sampler(VOCAB, CPU).sample(logits, inputs_of(rows))
    logits[2, 77], logits[11, 0], logits[4] = value, value, -math.inf
    result = Sampler(VOCAB, CPU).sample(logits, inputs_of(rows))
    assert result.row_errors == dict.fromkeys((2, 4, 11), "the logits hold NaN or infinity")
    for index in set(range(16)) - {2, 4, 11}:
        assert result.token_ids[index] == sound.token_ids[index]


def test_some_impossible_tokens_are_no_error() -> None:
    logits = torch.full((3, 6), -math.inf)
    logits[:, 3] = 1.0
    assert sample(logits, [Row(temperature=0), Row(), Row(top_p=0.5)]) == [3, 3, 3]


def test_bad_adjustments_and_empty_choices_end_their_row_alone() -> None:
    rows = mixed_rows()
    logits = logits_of(16)
    sound = sample(logits, rows)
    rows[8] = adjusted(rows[8], banned_token_ids=(VOCAB,))
    rows[1] = adjusted(rows[1], allowed_token_ids=())
    rows[5] = adjusted(rows[5], allowed_token_ids=(3,), banned_token_ids=(3,))
    rows[9] = adjusted(
        rows[9], logit_bias=((0, 1.0),), repetition_penalty=1e-38, history=counted((int(logits[9].argmax()),))
    )
    result = Sampler(VOCAB, CPU).sample(logits, inputs_of(rows))
    assert result.row_errors is not None
    assert sorted(result.row_errors) == [1, 5, 8, 9]
    assert "3000 is outside the vocabulary" in result.row_errors[8]
    assert "no token is left" in result.row_errors[1] and "no token is left" in result.row_errors[5]
    assert "infinity" in result.row_errors[9]
    for index in set(range(16)) - {1, 5, 8, 9}:
        assert result.token_ids[index] == sound[index]


def test_every_row_bad_is_no_crash() -> None:
    logits = torch.full((3, 10), math.nan)
    rows = [Row(num_logprobs=2), Row(temperature=0), adjusted(Row(), banned_token_ids=(1,))]
    result = Sampler(10, CPU).sample(logits, inputs_of(rows))
    assert sorted(result.row_errors or ()) == [0, 1, 2]
    assert result.logprobs == (None, None, None)


def test_no_rows() -> None:
    assert Sampler(10, CPU).sample(torch.zeros(0, 10), inputs_of([])).token_ids == []


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(2, 9\), expected \(2, 10\)"):
        Sampler(10, CPU).sample(torch.zeros(2, 9), inputs_of([Row()] * 2))


def test_one_token_vocabulary() -> None:
    assert sample(torch.zeros(3, 1), [Row(), Row(top_p=0.1), Row(temperature=0)]) == [0, 0, 0]


@pytest.mark.gpu
def test_the_device_draws_what_the_cpu_draws() -> None:
    device = torch.device("cuda")
    rows, logits = mixed_rows() * 4, logits_of(64).bfloat16()
    there = Sampler(VOCAB, device).sample(logits.to(device), inputs_of(rows))
    assert there.token_ids == sample(logits, rows)
