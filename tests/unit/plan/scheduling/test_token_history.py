"""Counts that go along with a sequence are those of counting it from scratch, and cost what is new of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.request import Request
from engine.plan.scheduling.batcher import ContinuousBatcher
from engine.plan.scheduling.sampling_table import SamplingTable
from engine.plan.scheduling.token_history import TokenHistory
from engine.plan.step_records import BatchDecision, DraftInputs, TokenCounts
from tests.support.engines import EngineShape, make_decoder
from tests.support.factories import drawn_by, make_batcher, make_request, make_runner
from tests.support.fake_drafters import FakeDrafter
from tests.support.sampling_reference import counted

TOKENS = st.lists(st.integers(0, 6), max_size=12)


def as_dict(counts: TokenCounts) -> dict[int, int]:
    """How often the output has each token of the sequence."""
    assert len(set(counts.token_ids.tolist())) == len(counts.token_ids)
    return dict(zip(counts.token_ids.tolist(), counts.in_output.tolist(), strict=True))


def from_scratch(token_ids: list[int], num_prompt_tokens: int, path: list[int]) -> dict[int, int]:
    return as_dict(counted(token_ids[:num_prompt_tokens], [*token_ids[num_prompt_tokens:], *path]))


@settings(deadline=None, max_examples=300)
@given(
    prompt=TOKENS,
    commands=st.lists(st.tuples(st.sampled_from(["commit", "ask", "cut"]), TOKENS, st.integers(0, 40))),
)
def test_counts_are_those_from_scratch_whatever_happens(
    prompt: list[int], commands: list[tuple[str, list[int], int]]
) -> None:
    token_ids, history = list(prompt), TokenHistory(len(prompt))
    for command, tokens, number in commands:
        if command == "commit":
            token_ids += tokens
        elif command == "cut":  # as a drafter does whose drafts were wrong, or which has to begin anew
            history.cut(token_ids, number)
            del token_ids[number:]
        else:
            history.follow(token_ids)
            assert as_dict(history.counts(tokens)) == from_scratch(token_ids, len(prompt), tokens)


def test_what_was_asked_for_does_not_change_with_the_sequence() -> None:
    token_ids, history = [1, 2], TokenHistory(1)
    history.follow(token_ids)
    before = history.counts()
    token_ids += [1, 3]
    history.follow(token_ids)
    history.cut(token_ids, 1)
    assert as_dict(before) == {1: 0, 2: 1}


class CountedTokens(list[int]):
    """Tokens that count how many of them are read, one by one, as a slice or all."""

    num_read = 0

    def __getitem__(self, index: Any, /) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"bad_words": ((1, 2, 3),)}]
)
def test_a_row_reads_what_is_new_and_not_the_context_again(sampling: dict[str, Any]) -> None:
    request = make_request("a", 8000, max_tokens=1000, **sampling)
    tokens = request.token_ids = CountedTokens(request.token_ids)
    table = SamplingTable(1)
    table.write(0, request)

    def gather() -> None:
        """A round of four drafts: five rows."""
        paths = [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 1)]
        drawn_by(table, np.zeros(5, np.int64), [request] * 5, np.arange(5), paths)

    gather()
    tokens.num_read = 0
    for token_id in range(50):
        request.append(token_id)
        gather()
    assert tokens.num_read <= 50 * 5 * 2, "of 2 million"


class Checked:
    """A batcher with short KV and wrong drafts, each of whose rows is held against a count from scratch."""

    def __init__(self, seed: int, **how: Any) -> None:
        self.draw = random.Random(seed)
        drafter = FakeDrafter(method="ngram", alpha=0.6, tree=seed % 3, is_stepwise=False)
        self.decoder = make_decoder(EngineShape(max_draft_tokens=4), [drafter])
        self.batcher: ContinuousBatcher = make_batcher(
            num_blocks=14, max_num_seqs=3, decoder=self.decoder, **how
        )
        self.drafter = drafter
        self.runner = make_runner(self.batcher)
        self.requests: dict[str, Request] = {}
        self.num_checked = self.num_with_drafts = 0

    def add(self) -> None:
        number = len(self.requests)
        prompt = [self.draw.randrange(257) for _ in range(self.draw.randrange(1, 12))]
        request = make_request(str(number), prompt, arrival=number, max_tokens=24, frequency_penalty=0.5)
        self.requests[request.request_id] = request
        self.batcher.add(request)

    def step(self) -> None:
        closed = self.decoder.links[0].take_closed()
        self.drafter.close(closed)
        jobs = self.decoder.links[0].jobs(ahead=False)
        if jobs:
            for job, draft in zip(jobs, self.drafter.draft(jobs).drafts, strict=True):
                self.decoder.links[0].put(job, draft)
        decision = self.batcher.step()
        if decision.inputs is not None:
            self.check(decision)
            self.batcher.commit(decision, self.runner.run(decision.inputs).rows)

    def check(self, decision: BatchDecision) -> None:
        assert decision.inputs is not None
        paths = paths_of(decision.inputs.drafts)
        found = {adjustment.row: adjustment for adjustment in decision.inputs.sampling.adjustments}
        rows = iter(range(len(found)))
        for entry in decision.scheduled:
            request = self.requests[entry.request_id]
            for _ in range((entry.num_drafts + 1) * entry.samples):
                row = next(rows)
                path, history = paths.get(row, []), found[row].history
                assert history is not None
                assert as_dict(history) == from_scratch(request.token_ids, request.num_prompt_tokens, path)
                self.num_checked += 1
                self.num_with_drafts += bool(path)
        assert next(rows, None) is None


def paths_of(drafts: DraftInputs | None) -> dict[int, list[int]]:
    """The drafts that stand before each row of logits that follows one."""
    paths: dict[int, list[int]] = {}
    if drafts is None:
        return paths
    ends = np.cumsum(drafts.num_drafts)
    for first_row, count, end in zip(drafts.first_row, drafts.num_drafts, ends, strict=True):
        for i, place in enumerate(range(end - count, end)):
            parent = i - 1 if drafts.parents is None else int(drafts.parents[place])
            before = paths.get(int(first_row) + 1 + parent, [])
            paths[int(first_row) + 1 + i] = [*before, int(drafts.token_ids[place])]
    return paths


@pytest.mark.parametrize("how", [{}, {"num_host_blocks": 8, "preemption": "swap"}], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_have_the_right_counts_through_drafts_preemption_and_seats_taken_again(
    seed: int, how: dict[str, Any]
) -> None:
    checked = Checked(seed, **how)
    for _ in range(7):
        checked.add()
    for _ in range(400):
        checked.step()
        if not checked.batcher.has_work:
            break
    assert not checked.batcher.has_work
    assert checked.num_checked > 50 and checked.num_with_drafts > 10
    assert sum(request.num_preemptions for request in checked.requests.values()) > 0
