"""Whatever rows ask for, a StepDraw gives what the Sampler gives, and never asks the device for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.compute.cuda.device_draw import DrawColumns, column_words, draw_filtered, draw_plain
from engine.compute.cuda.device_ints import send
from engine.compute.cuda.graphs.device_pass import DevicePass, TokenMemory
from engine.compute.cuda.step_draw import StepDraw, likeliest
from engine.compute.sampling.logprobs import raw_logprobs
from engine.compute.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Sampler
from engine.plan.grammar import MaskOf
from engine.plan.step_records import LogitAdjustment, SampledRows
from tests.support.examples import share_of
from tests.support.fixed_grammar import Allowing
from tests.support.sampling_reference import CPU, NEUTRAL, Row, adjusted, counted, inputs_of

VOCAB = 43  # no whole number of bytes or words of a mask
TOKEN = st.integers(0, VOCAB - 1)
# Quarters make ties common, as bfloat16 does; some tokens are ruled out, some rows are spoiled.
LOGIT = st.one_of(
    st.integers(-40, 40).map(lambda n: n / 4), st.floats(-30, 30, width=32), st.just(float("-inf"))
)
SPOILED = st.sampled_from([None] * 8 + [float("nan"), float("inf")])


def mask_of(allowed: frozenset[int], size: int = VOCAB) -> MaskOf:
    return MaskOf(Allowing(allowed, size))


FIGURE = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.25, 1.5])
ADJUSTMENT = st.builds(
    LogitAdjustment,
    row=st.just(0),
    logit_bias=st.dictionaries(TOKEN, st.floats(-20, 20, width=32), max_size=4).map(lambda d: (*d.items(),)),
    allowed_token_ids=st.one_of(st.none(), st.lists(TOKEN, max_size=5).map(tuple)),
    allowed_mask=st.one_of(st.none(), st.frozensets(TOKEN, max_size=30).map(mask_of)),
    banned_token_ids=st.lists(st.one_of(TOKEN, TOKEN, TOKEN, st.just(VOCAB)), max_size=4).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    presence_penalty=FIGURE,
    frequency_penalty=FIGURE,
    history=st.builds(counted, st.lists(TOKEN, max_size=6), st.lists(TOKEN, max_size=6)),
)
ROW = st.builds(
    Row,
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 5)),
    top_k=st.sampled_from([0, 0, -1, 1, 2, 5, 42, 43, 100]),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
    num_logprobs=st.sampled_from([-1, -1, 0, 1, 5, 20, 100]),
    adjustment=st.one_of(st.just(NEUTRAL), ADJUSTMENT),
)


def under_way(
    logits: torch.Tensor, rows: Sequence[Row], places: np.ndarray, memory: TokenMemory
) -> DevicePass:
    """A pass over these logits, as the runner has it: row r at `places[r]`, its columns sent before."""
    words = send(column_words(inputs_of(rows), places, len(logits)), CPU)
    return DevicePass(logits, places, lambda: memory.draw(logits, DrawColumns.of(words)))


def drawn(logits: torch.Tensor, rows: Sequence[Row], places: Sequence[int] | None = None) -> SampledRows:
    at = np.arange(len(rows)) if places is None else np.array(places)
    memory = TokenMemory(torch.zeros(64, dtype=torch.int64), draw_plain)
    spread = torch.zeros(int(at.max()) + 1, VOCAB, dtype=logits.dtype)
    spread[at] = logits
    step = under_way(spread, rows, at, memory)
    with never_waiting():
        tokens = StepDraw(memory, draw_filtered).queue(step, inputs_of(rows))
    return tokens.verdict(inputs_of(rows), None).rows


_WAITING = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "bincount", "is_nonzero", "equal")


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that ask the device for a number or a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in _WAITING and "unique" not in name, f"{name} waits for the device"
        if name.startswith("index"):
            indices = args[1] if isinstance(args[1], list | tuple) else ()
            kinds = [index.dtype for index in indices if isinstance(index, torch.Tensor)]
            assert torch.bool not in kinds, "an index of truths waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def never_waiting() -> Iterator[None]:
    """Fail where a tensor is read, or its contents decide a shape."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
            patch.setattr(torch.Tensor, name, refuse(name))
        with _Refusing():  # type: ignore[no-untyped-call]
            yield


def same(ours: SampledRows, expected: SampledRows) -> None:
    failed = expected.row_errors or {}
    assert (ours.row_errors or {}) == failed
    for row, (mine, theirs) in enumerate(zip(ours.token_ids, expected.token_ids, strict=True)):
        assert mine == theirs or row in failed, f"row {row}"
    assert ours.logprobs == expected.logprobs


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, list[Row], list[int]]:
    rows = draw(st.lists(ROW, min_size=1, max_size=5))
    logits = torch.tensor([draw(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB)) for _ in rows])
    for row in range(len(rows)):
        spoiled = draw(SPOILED)
        if spoiled is not None:
            logits[row, draw(TOKEN)] = spoiled
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    gaps = draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    return logits, rows, (np.cumsum(gaps) - 1).tolist()


@pytest.mark.parametrize("group_logits", [2**22, 2 * VOCAB])
@given(step=steps())
@settings(max_examples=share_of(200), deadline=None)
def test_all_that_rows_ask_for_is_as_the_sampler_has_it(
    group_logits: int, step: tuple[torch.Tensor, list[Row], list[int]]
) -> None:
    logits, rows, places = step
    expected = Sampler(VOCAB, CPU).sample(logits, inputs_of(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", group_logits)
        same(drawn(logits, rows, places), expected)


def test_what_is_wrong_with_a_row_is_said_of_it_alone() -> None:
    sound = torch.linspace(-1, 1, VOCAB).repeat(5, 1)
    sound[1, 3] = torch.nan
    sound[2, 4] = torch.inf
    rows = [
        adjusted(Row(num_logprobs=2), allowed_mask=mask_of(frozenset())),
        adjusted(Row(), banned_token_ids=(1,)),
        adjusted(Row(), banned_token_ids=(4, VOCAB)),
        adjusted(Row(num_logprobs=0), allowed_mask=mask_of(frozenset([1]), 2 * VOCAB)),
        adjusted(Row(temperature=0.0, num_logprobs=1), banned_token_ids=(VOCAB - 1,)),
    ]
    result = drawn(sound, rows)
    assert result.row_errors == {
        0: NOTHING_LEFT,
        1: NOT_FINITE,
        2: NOT_FINITE,
        3: "bad logit adjustment: a mask of 11 bytes is not for 43 tokens",
    }
    assert result.token_ids[4] == VOCAB - 2
    assert result.logprobs is not None
    assert [record is not None for record in result.logprobs] == [False, False, False, False, True]
    same(result, Sampler(VOCAB, CPU).sample(sound, inputs_of(rows)))


@given(
    logits=st.lists(st.one_of(LOGIT, st.just(-0.0), st.just(0.0)), min_size=VOCAB, max_size=VOCAB),
    count=st.integers(1, VOCAB),
)
def test_the_likeliest_come_in_the_order_of_their_ids_where_they_are_equal(
    logits: list[float], count: int
) -> None:
    expected = sorted(range(VOCAB), key=lambda token_id: (-logits[token_id], token_id))[:count]
    assert likeliest(torch.tensor([logits]), count).tolist() == [expected]
    (record,) = raw_logprobs(torch.tensor([[*logits[:-1], 50.0]]), [0], [count])
    assert record.top[0][0] == VOCAB - 1


def test_the_sampler_itself_is_found_to_wait() -> None:
    logits, sampler = torch.zeros(1, VOCAB), Sampler(VOCAB, CPU)
    for row in (Row(), adjusted(Row(), banned_token_ids=(1,)), Row(num_logprobs=2)):
        with pytest.raises(AssertionError, match="waits for the device"), never_waiting():
            sampler.sample(logits, inputs_of([row]))


def test_the_tokens_lie_where_the_next_step_looks_for_them() -> None:
    memory = TokenMemory(torch.full((8,), 77), draw_plain)
    logits = torch.linspace(-1, 1, VOCAB).repeat(4, 1)
    rows = [Row(temperature=0.0), adjusted(Row(temperature=0.0), banned_token_ids=(VOCAB - 1,))]
    places = np.array([1, 3])
    StepDraw(memory, draw_filtered).queue(under_way(logits, rows, places, memory), inputs_of(rows))
    assert memory.tokens[[1, 3]].tolist() == [VOCAB - 1, VOCAB - 2]
    assert memory.tokens[4:].tolist() == [77] * 4


def test_a_step_without_rows_draws_nothing() -> None:
    memory = TokenMemory(torch.zeros(4, dtype=torch.int64), draw_plain)
    step = DevicePass(torch.zeros(0, VOCAB), np.zeros(0, np.int64), lambda: None)
    tokens = StepDraw(memory, draw_filtered).queue(step, inputs_of([]))
    rows = tokens.verdict(inputs_of([]), None).rows
    assert replace(rows, logprobs=None) == SampledRows([])
