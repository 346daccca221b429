"""The law of a row as a table, draws from it for drafters, and streams that know nothing of each other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.sampling.noise import Stream, row_keys, uniforms
from engine.compute.sampling.sampler import Sampler, draw_tokens, select_rows
from engine.plan.step_records import NO_TOKEN
from tests.support.sampling_reference import (
    CPU,
    Row,
    adjusted,
    chi_square_p,
    counted,
    inputs_of,
    reference_probs,
)

VOCAB = 12
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
ROWS = [
    Row(),
    Row(temperature=0),
    Row(temperature=0.5, top_k=4),
    Row(top_p=0.8),
    Row(temperature=2.0, min_p=0.15),
    adjusted(
        Row(temperature=0.9), presence_penalty=0.6, history=counted(output=(1, 2)), banned_token_ids=(3,)
    ),
    adjusted(Row(temperature=0), banned_token_ids=(int(LOGITS.argmax()),)),
]


def test_probs_are_the_law_of_the_draw() -> None:
    probs, errors = Sampler(VOCAB, CPU).probs(LOGITS.expand(len(ROWS), VOCAB), inputs_of(ROWS))
    assert errors == {} and probs.dtype == torch.float64
    for index, row in enumerate(ROWS):
        if row.temperature:
            expected = reference_probs(LOGITS[0].double().numpy(), row)
            assert probs[index].numpy() == pytest.approx(expected, abs=1e-6)
        else:
            chosen = Sampler(VOCAB, CPU).sample(LOGITS, inputs_of([row])).token_ids[0]
            assert probs[index].tolist() == [float(token == chosen) for token in range(VOCAB)]


@pytest.mark.parametrize("row", [ROWS[0], ROWS[2], ROWS[5]])
def test_drafts_follow_the_law_that_is_recorded(row: Row) -> None:
    rows = [replace(row, seed=seed, position=3) for seed in range(8000)]
    drawn = Sampler(VOCAB, CPU).sample_with_probs(
        LOGITS.expand(8000, VOCAB), inputs_of(rows), np.full(8000, 2)
    )
    law = reference_probs(LOGITS[0].double().numpy(), row)
    assert drawn.probs.dtype == torch.float32 and drawn.probs[5].numpy() == pytest.approx(law, abs=1e-6)
    assert chi_square_p(drawn.token_ids, law) > 1e-3


def test_drafts_differ_by_seed_position_and_round() -> None:
    logits = torch.zeros(40, VOCAB)
    for rows, rounds in (
        ([Row(seed=i) for i in range(40)], [7] * 40),
        ([Row(position=i) for i in range(40)], [7] * 40),
        ([Row(position=50)] * 40, list(range(40))),
    ):
        drawn = Sampler(VOCAB, CPU).sample_with_probs(logits, inputs_of(rows), np.array(rounds))
        assert len(set(drawn.token_ids)) > 6
    again = Sampler(VOCAB, CPU).sample_with_probs(logits[:2], inputs_of([Row()] * 2), np.array([3, 3]))
    assert again.token_ids[0] == again.token_ids[1]


def test_a_row_that_fails_has_no_draft() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = math.nan
    rows = [Row(), Row(), adjusted(Row(), allowed_token_ids=())]
    drawn = Sampler(VOCAB, CPU).sample_with_probs(logits, inputs_of(rows), np.zeros(3, np.int64))
    assert sorted(drawn.row_errors) == [1, 2] and drawn.token_ids[1:] == [NO_TOKEN] * 2
    assert drawn.token_ids[0] != NO_TOKEN


def test_the_draw_never_gives_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0, 0.0]], dtype=torch.float64).expand(5, -1)
    uniform = torch.tensor([1e-300, 0.3 - 1e-12, 0.3 + 1e-12, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(weights, uniform).tolist() == [1, 1, 3, 3, 3]


def test_streams_and_labels_are_uniform_and_know_nothing_of_each_other() -> None:
    seeds, zeros = np.arange(4000), np.zeros(4000, np.int64)
    labels = torch.arange(2).expand(4000, 2)
    numbers = {stream: uniforms(row_keys(seeds, zeros, stream), labels) for stream in Stream}
    columns = [column for table in numbers.values() for column in table.T.numpy()]
    for column in columns:
        assert column.min() > 0 and column.max() < 1
        assert chi_square_p((column * 20).astype(int).tolist(), np.full(20, 0.05)) > 1e-3
    for index, first in enumerate(columns):
        for second in columns[index + 1 :]:
            cells = (first * 8).astype(int) * 8 + (second * 8).astype(int)
            assert chi_square_p(cells.tolist(), np.full(64, 1 / 64)) > 1e-4


def test_no_two_streams_share_a_key() -> None:
    positions = np.arange(50_000)
    keys = [row_keys(np.zeros_like(positions), positions, stream).numpy() for stream in Stream]
    words = np.concatenate(keys).view(np.uint32).astype(np.uint64)
    assert len(np.unique(words[:, 0] << np.uint64(32) | words[:, 1])) == 4 * len(positions)


def test_rows_are_selected_with_their_adjustments() -> None:
    picked = select_rows(inputs_of(ROWS), np.array([6, 0, 5]))
    assert picked.temperature.tolist() == pytest.approx([0, 1, 0.9])
    assert {adjustment.row: adjustment.banned_token_ids for adjustment in picked.adjustments} == {
        0: (int(LOGITS.argmax()),),
        2: (3,),
    }
