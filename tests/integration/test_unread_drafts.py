"""Steps that verify drafts which the host has not read, on a CPU that plays along: what known drafts give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.cuda import cuda_runner
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.device_tokens import DeviceTokens
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.plan.step_records import NO_TOKEN, Int64, StepInputs, UnreadDrafts
from tests.integration.test_cuda_runner import (
    BLOCK_SIZE,
    BLOCKS,
    MATCHED,
    TOKENS,
    agree_on_features,
    agree_on_logprobs,
    chain,
    count_replays,
    fill_with_noise,
    make_ahead,
    make_plain,
    never_judged_while_launched,
)
from tests.support.device_waits import WaitingRefused
from tests.support.recorded import with_sampling


def drafted(plain: ModelRunner, temperature: float) -> StepInputs:
    """Three chains: right all along, none at all, right but for its second draft."""
    known = []
    for row, count in ((0, 3), (2, 3)):
        tokens = [*(TOKENS[row:] + TOKENS)[: 11 + row]]
        for _ in range(count):
            parts = [Part(tokens, len(tokens) - 1, len(tokens), BLOCKS[row])]
            tokens += plain.run(pack_step(parts, BLOCK_SIZE, temperature=temperature)).rows.token_ids
        known.append(tokens)
    known[1][-2] = (known[1][-2] + 1) % 512
    parts = [
        Part(known[0], 10, 14, BLOCKS[0], range(-1, 2)),
        Part(TOKENS[1:], 11, 12, BLOCKS[1]),
        Part(known[1], 12, 16, BLOCKS[2], range(-1, 2)),
    ]
    return pack_step(parts, BLOCK_SIZE, temperature=temperature)


def unread(inputs: StepInputs, known: Sequence[int] = ()) -> StepInputs:
    """The same, of whose drafts the host has read only the `known` ones; the others lie in another order."""
    drafts = inputs.drafts
    assert drafts is not None
    order = np.random.default_rng(1).permutation(len(drafts.token_ids) + 3)
    places, token_ids = order[: len(drafts.token_ids)].copy(), drafts.token_ids.copy()
    memory = np.full(len(order), 500)
    memory[places] = token_ids
    places[list(known)] = -1
    token_ids[places >= 0] = NO_TOKEN
    all_ids = inputs.token_ids.copy()
    all_ids[inputs.logits_rows[drafts.rows]] = token_ids
    tokens = DeviceTokens(time.perf_counter(), torch.from_numpy(memory))
    hidden = replace(drafts, token_ids=token_ids, unread=UnreadDrafts(tokens, places))
    return replace(inputs, token_ids=all_ids, drafts=hidden)


def agree(
    plain: ModelRunner, ahead: CudaRunner, known: StepInputs, inputs: StepInputs, *, waits: bool = False
) -> None:
    fill_with_noise(plain, ahead)
    with nullcontext() if waits else WaitingRefused():  # type: ignore[no-untyped-call]
        step = ahead.launch(inputs)
    ours, expected = step.wait(), plain.run(known)
    assert replace(ours.rows, logprobs=None) == replace(expected.rows, logprobs=None)
    agree_on_logprobs(ours.rows.logprobs or (), expected.rows.logprobs or ())
    agree_on_features(ours, expected)
    for mine, theirs in zip(ahead.kv.tensors, plain.kv.tensors, strict=True):
        torch.testing.assert_close(mine, theirs)


def committed(inputs: StepInputs, row: int, count: int) -> Int64:
    return inputs.token_ids[row : row + count]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("known", [(), (0, 4)], ids=["none known", "some known"])
@pytest.mark.parametrize("for_drafts", [MATCHED, ForDrafts("match", True, (1, 0))], ids=["plain", "features"])
def test_they_are_computed_and_judged_as_known_ones_are(
    for_drafts: ForDrafts, known: Sequence[int], recorded: bool, temperature: float
) -> None:
    plain, ahead = make_plain(for_drafts=for_drafts), make_ahead(for_drafts=for_drafts)
    fill_with_noise(plain)
    inputs = drafted(plain, temperature)
    inputs = with_sampling(inputs, num_logprobs=np.repeat([1, -1, 0], [4, 1, 4]).astype(np.int32))
    replayed = count_replays(ahead)
    if not recorded:
        ahead.graphs._steps.clear()
    never_judged_while_launched(ahead)
    agree(plain, ahead, inputs, unread(inputs, known))
    assert bool(replayed) == recorded
    rows = plain.run(inputs).rows.token_ids
    assert rows[:3] == committed(inputs, 1, 3).tolist() and rows[3] >= 0, "all of them were right"
    assert rows[5] == inputs.token_ids[6] and rows[6] >= 0 and rows[7:] == [NO_TOKEN] * 2


def test_those_that_have_no_room_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "_UNREAD_PLACES", 1)
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain)
    inputs = drafted(plain, 0.0)
    agree(plain, ahead, inputs, unread(inputs, (1,)))


def test_a_draw_that_is_left_to_the_sampler_reads_them() -> None:
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain)
    inputs = drafted(plain, 1.0)
    inputs = with_sampling(inputs, top_k=np.array([0] * 8 + [np.iinfo(np.int32).min], np.int32))
    agree(plain, ahead, inputs, unread(inputs), waits=True)


def test_a_draft_that_could_not_be_drawn_is_refused_with_those_behind_it() -> None:
    """Also where the target cannot draw either, which is an error of its row and no agreement."""
    plain, ahead = make_plain(), make_ahead()
    fill_with_noise(plain)
    right = drafted(plain, 0.0)
    fill_with_noise(plain, ahead)
    for runner in (plain, ahead):
        runner.kv.values[0][BLOCKS[2][0]] = torch.nan
    inputs = unread(right)
    assert inputs.drafts is not None and inputs.drafts.unread is not None
    tokens = inputs.drafts.unread.tokens
    assert isinstance(tokens, DeviceTokens)
    for draft in (1, 3):
        tokens.tokens[inputs.drafts.unread.places[draft]] = NO_TOKEN
    rows = ahead.run(inputs).rows
    assert rows.token_ids[0] == right.token_ids[1] and rows.token_ids[1] >= 0
    assert rows.token_ids[2:4] == [NO_TOKEN] * 2
    assert list(rows.row_errors or ()) == [5] and rows.token_ids[6:] == [NO_TOKEN] * 3


@pytest.mark.parametrize("num_steps", [[3, 3, 3], [5, 0, 2]])
def test_a_chain_says_where_its_tokens_lie(num_steps: list[int]) -> None:
    first, steps = chain("all", num_steps)
    ahead = make_ahead()
    fill_with_noise(ahead)
    launched, rest = ahead.launch(first), ahead.follow(steps)
    assert rest.unread is not None and isinstance(rest.unread.tokens, DeviceTokens)
    ahead.run(first)  # which draws over the first ones
    tokens, places = rest.unread.tokens.read(), rest.unread.places
    assert tokens[places[:, 0]].tolist() == launched.wait().rows.token_ids
    drawn = rest.wait()
    for row, count in enumerate(num_steps):
        column = steps.previous_rows.tolist().index(row) if count else 0
        assert tokens[places[row, 1 : 1 + count]].tolist() == drawn[:count, column].tolist()


def test_a_single_step_keeps_its_tokens_where_asked_to() -> None:
    first, _ = chain("nothing", [1, 1, 1])
    ahead = make_ahead()
    fill_with_noise(ahead)
    launched = ahead.launch(first)
    kept = ahead.keep()
    ahead.run(replace(first, token_ids=first.token_ids[::-1].copy()))
    assert isinstance(kept.tokens, DeviceTokens) and kept.places.shape == (3, 1)
    assert kept.tokens.read()[kept.places[:, 0]].tolist() == launched.wait().rows.token_ids
