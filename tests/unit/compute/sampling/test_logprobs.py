"""Log-probabilities: raw, ranked, in order, and only for the rows that ask."""

from __future__ import annotations

import math

import pytest
import torch

from engine.compute.sampling import logprobs
from engine.compute.sampling.logprobs import raw_logprobs
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import SampledRows, TokenLogprobs
from tests.support.sampling_reference import CPU, Row, adjusted, inputs_of

LOGITS = torch.tensor([[0.25, 0.0625, 0.5, 0.125, 0.0625]]).log() + 7


def run(logits: torch.Tensor, rows: list[Row]) -> SampledRows:
    return Sampler(logits.shape[1], CPU).sample(logits, inputs_of(rows))


def test_value_rank_and_the_likeliest_in_order() -> None:
    (record,) = raw_logprobs(LOGITS, [4], [4])
    assert record.token_id == 4
    assert record.logprob == pytest.approx(math.log(0.0625))
    assert record.rank == 4  # equal to token 1, which takes no place of its own
    assert [token_id for token_id, _ in record.top] == [2, 0, 3, 1]
    assert [logprob for _, logprob in record.top] == pytest.approx(
        [math.log(p) for p in (0.5, 0.25, 0.125, 0.0625)]
    )


def test_rows_ask_for_different_numbers() -> None:
    records = raw_logprobs(LOGITS.repeat(4, 1), [2, 2, 0, 0], [0, 2, 5, 50])
    assert [len(record.top) for record in records] == [0, 2, 5, 5]
    assert [record.rank for record in records] == [1, 1, 2, 2]


def test_ties_are_listed_in_id_order() -> None:
    (record,) = raw_logprobs(torch.zeros(1, 300), [7], [3])
    assert [token_id for token_id, _ in record.top] == [0, 1, 2]
    assert record.rank == 1


def test_processors_do_not_show() -> None:
    plain = run(LOGITS, [Row(temperature=0, num_logprobs=5)])
    row = adjusted(
        Row(temperature=0.3, top_k=1, num_logprobs=5), banned_token_ids=(2,), logit_bias=((0, 9.0),)
    )
    processed = run(LOGITS, [row])
    assert plain.logprobs is not None and plain.logprobs[0] is not None
    assert processed.logprobs is not None and processed.logprobs[0] is not None
    assert processed.token_ids == [0]
    assert processed.logprobs[0].logprob == pytest.approx(math.log(0.25))
    assert processed.logprobs[0].rank == 2
    assert processed.logprobs[0].top == plain.logprobs[0].top


def test_few_rows_are_scored_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    rows = [Row(seed=row, num_logprobs=row % 4 - 1) for row in range(9)]
    whole, seen = run(logits, rows).logprobs, []

    def watched(some: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
        seen.append(len(some))
        return raw_logprobs(some, token_ids, num_top)

    monkeypatch.setattr(logprobs, "raw_logprobs", watched)
    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 4 * 40)
    assert run(logits, rows).logprobs == whole and seen == [4, 2]


def test_only_the_rows_that_ask_and_are_sound() -> None:
    logits = LOGITS.repeat(4, 1)
    logits[2, 0] = math.nan
    result = run(
        logits, [Row(), Row(num_logprobs=0), Row(num_logprobs=3), Row(temperature=0, num_logprobs=1)]
    )
    assert result.logprobs is not None
    assert [record is not None for record in result.logprobs] == [False, True, False, True]
    assert result.logprobs[3] is not None and result.logprobs[3].top[0][0] == 2
    assert run(LOGITS, [Row()]).logprobs is None
    assert run(LOGITS, [Row(temperature=0)]).logprobs is None


def test_values_are_those_of_float32_log_softmax_from_bfloat16() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(4)).bfloat16()
    result = run(logits, [Row(temperature=0, num_logprobs=20)] * 3)
    assert result.logprobs is not None
    expected = torch.log_softmax(logits.double(), dim=1)
    for row, record in enumerate(result.logprobs):
        assert record is not None
        assert record.logprob == pytest.approx(float(expected[row, record.token_id]), abs=1e-5)
        assert record.rank == 1 and record.top[0] == (record.token_id, record.logprob)
        values = [value for _, value in record.top]
        assert values == sorted(values, reverse=True) and len(values) == 20
        assert values[-1] == pytest.approx(float(expected[row].topk(20).values[-1]), abs=1e-5)
