"""Properties of the sampler under any logits and parameters that hypothesis can think of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import LogitAdjustment
from tests.support.examples import share_of
from tests.support.sampling_reference import (
    CPU,
    Row,
    border_margin,
    counted,
    dense_draw,
    engine_probs,
    inputs_of,
    reference_probs,
    sample,
)

VOCAB = 24
INT64 = st.integers(-(2**63), 2**63 - 1)
# Quarters make ties common, as bfloat16 does.
LOGIT = st.one_of(st.integers(-40, 40).map(lambda n: n / 4), st.floats(-30, 30, width=32))
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8).map(tuple)


def rows(temperature: st.SearchStrategy[float]) -> st.SearchStrategy[Row]:
    """Rows without adjustments."""
    return st.builds(
        Row,
        temperature=temperature,
        top_k=st.sampled_from([0, 0, 1, 2, 5, 23, 24, 100]),
        top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
        min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
        seed=INT64,
        position=st.integers(0, 2**40),
    )


ADJUSTMENT = st.builds(
    LogitAdjustment,
    row=st.just(0),
    logit_bias=st.lists(
        st.tuples(st.integers(0, VOCAB - 1), st.integers(-100, 100).map(float)), max_size=3
    ).map(tuple),
    allowed_token_ids=st.one_of(
        st.none(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6).map(tuple)
    ),
    banned_token_ids=TOKENS,
    # Powers of two keep float32 exact, so that equal logits stay equal in the float64 reading.
    repetition_penalty=st.sampled_from([0.5, 1.0, 2.0]),
    presence_penalty=st.integers(-8, 8).map(lambda n: n / 4),
    frequency_penalty=st.integers(-8, 8).map(lambda n: n / 4),
    history=st.builds(counted, TOKENS, TOKENS),
)
DRAWN = rows(st.floats(0.0625, 16, width=32))


@settings(deadline=None, max_examples=share_of(100))
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    row=DRAWN,
    adjustment=ADJUSTMENT,
)
def test_probabilities_equal_the_float64_reading(
    logits: list[float], row: Row, adjustment: LogitAdjustment
) -> None:
    row = replace(row, adjustment=adjustment)
    expected_of = np.array(logits)
    expected = reference_probs(expected_of, row)
    assume(expected.any() and border_margin(expected_of, row) > 1e-5)
    assert engine_probs(torch.tensor([logits]), [row])[0] == pytest.approx(expected, abs=2e-6)


@settings(deadline=None, max_examples=share_of(60))
@given(
    logits=st.lists(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=6),
    row=st.lists(DRAWN, min_size=6, max_size=6),
)
def test_a_draw_equals_the_draw_over_all_tokens(logits: list[list[float]], row: list[Row]) -> None:
    tensor = torch.tensor(logits)
    assert sample(tensor, row[: len(logits)]) == dense_draw(tensor, row[: len(logits)])


@settings(deadline=None, max_examples=share_of(40))
@given(
    spread=st.floats(0, 40),
    generator=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.0625, 16, width=32),
    seed=INT64,
    position=st.integers(0, 2**40),
    bfloat16=st.booleans(),
)
def test_pruning_loses_no_winner(
    spread: float, generator: int, temperature: float, seed: int, position: int, bfloat16: bool
) -> None:
    """Unfiltered rows of a wide vocabulary, from flat to spiky: the pruned draw is the dense one."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(generator)) * spread
    if bfloat16:
        logits = logits.bfloat16().float()
    drawn = [Row(temperature=temperature, seed=seed, position=position + i) for i in range(4)]
    assert sample(logits, drawn) == dense_draw(logits, drawn)


@settings(deadline=None, max_examples=share_of(50))
@given(data=st.data(), size=st.integers(1, 16), generator=st.integers(0, 2**32 - 1))
def test_neighbours_and_order_change_nothing(data: st.DataObject, size: int, generator: int) -> None:
    """Any rows, some broken: a row's token and error are what it gets alone."""
    any_row = st.builds(
        lambda row, adjustment, count: replace(row, adjustment=adjustment, num_logprobs=count),
        rows(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0, 5.0])),
        st.one_of(st.just(LogitAdjustment(row=0)), ADJUSTMENT),
        st.integers(-1, 3),
    )
    batch = data.draw(st.lists(any_row, min_size=size, max_size=size))
    logits = (torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(generator)) * 8).round() / 4
    for broken in data.draw(st.sets(st.integers(0, size - 1), max_size=3)):
        logits[broken, generator % VOCAB] = data.draw(st.sampled_from([float("nan"), float("inf")]))
    sampler = Sampler(VOCAB, CPU)
    together = sampler.sample(logits, inputs_of(batch))
    errors = together.row_errors or {}
    for index, row in enumerate(batch):
        alone = sampler.sample(logits[index : index + 1], inputs_of([row]))
        assert (alone.row_errors or {}).get(0) == errors.get(index)
        if index not in errors:
            assert alone.token_ids[0] == together.token_ids[index]
            assert (alone.logprobs or (None,))[0] == (together.logprobs or {index: None})[index]
