"""Drawing without waiting for the device gives the tokens that the Sampler gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.cuda.device_draw import (
    DrawColumns,
    column_shapes,
    column_words,
    draw_filtered,
    draw_plain,
    filtered_rows,
)
from engine.compute.cuda.step_draw import can_draw
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import NO_TOKEN
from tests.support.examples import share_of
from tests.support.sampling_reference import CPU, Row, inputs_of

VOCAB = 40
# Quarters make ties common, as bfloat16 does; some tokens are ruled out.
LOGIT = st.one_of(
    st.integers(-40, 40).map(lambda n: n / 4), st.floats(-30, 30, width=32), st.just(float("-inf"))
)
ROW = st.builds(
    Row,
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 5)),
    top_k=st.sampled_from([0, 0, -1, 1, 2, 5, 39, 40, 100]),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
)


def drawn(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Each row at a place of its own, in reverse and with one unused place between any two."""
    inputs = inputs_of(rows)
    num_places = 2 * len(rows)
    places = np.arange(num_places - 1, 0, -2)
    by_place = torch.full((num_places, logits.shape[1]), torch.nan, dtype=logits.dtype)
    by_place[places] = logits
    words = column_words(inputs, places, num_places)
    assert {name: column.shape for name, column in words.items()} == column_shapes(num_places)
    columns = DrawColumns.of({name: torch.from_numpy(column) for name, column in words.items()})
    before = by_place.clone()
    token_ids = draw_plain(by_place, columns)
    filtered = filtered_rows(inputs, logits.shape[1])
    if filtered is not None:
        sent = {name: torch.from_numpy(column) for name, column in filtered.words.items()}
        at = torch.from_numpy(places[filtered.rows])
        token_ids[at] = draw_filtered(by_place, at, filtered.filters(sent), sent["keys"])
    assert torch.equal(by_place.nan_to_num(7), before.nan_to_num(7)), "the logits are left as they are"
    assert (token_ids[::2] == NO_TOKEN).all()
    return token_ids[places].tolist()


def sampled(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    result = Sampler(logits.shape[1], CPU).sample(logits, inputs_of(rows))
    errors = result.row_errors or {}
    return [NO_TOKEN if row in errors else token for row, token in enumerate(result.token_ids)]


@given(st.lists(st.tuples(ROW, st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB)), min_size=1, max_size=4))
@settings(max_examples=share_of(60), deadline=None)
def test_the_tokens_are_the_samplers(rows: list[tuple[Row, list[float]]]) -> None:
    logits = torch.tensor([values for _, values in rows])
    parameters = [row for row, _ in rows]
    assert drawn(logits, parameters) == sampled(logits, parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_the_samplers_over_a_real_vocabulary(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    rows = [
        Row(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 50, 5000])),
            top_p=float(rng.choice([1.0, 0.2, 0.95, 0.9999])),
            min_p=float(rng.choice([0.0, 0.0, 0.02])),
            seed=int(rng.integers(2**62)),
            position=row,
        )
        for row in range(48)
    ]
    logits = torch.randn(48, 20_011, generator=torch.Generator().manual_seed(0)) * 2
    logits = logits.to(dtype)
    assert drawn(logits, rows) == sampled(logits, rows)


def test_rows_that_do_not_fit_into_memory_at_once_are_the_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 3 * VOCAB)
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [Row(top_k=row, top_p=0.8, seed=row) for row in range(11)]
    assert drawn(logits, rows) == sampled(logits, rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(top_k=3)])
def test_what_is_not_finite_is_no_token(bad: float, row: Row) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 7] = bad
    first, second = drawn(logits, [row, row])
    assert first == NO_TOKEN and second == sampled(logits[1:], [row])[0]


def test_a_row_of_nothing_is_no_token() -> None:
    assert drawn(torch.full((1, VOCAB), -torch.inf), [Row(top_p=0.5)]) == [NO_TOKEN]


def test_what_is_left_to_the_sampler() -> None:
    assert can_draw(inputs_of([Row(), Row(temperature=0.0, top_k=-1)]))
    assert not can_draw(inputs_of([Row(top_k=int(np.iinfo(np.int32).min))]))
