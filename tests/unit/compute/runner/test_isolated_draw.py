"""A sequence that cannot be drawn for fails alone, and the others get what they would have got."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.runner.isolated_draw import draw_isolated
from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verified import Verified
from engine.compute.verification.verifier import make_verifier
from engine.faults.faulty_sampler import CURSED, FaultySampler
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import NO_TOKEN, DraftInputs, SampledRows, SamplingInputs
from tests.support.sampling_reference import CPU, Row, inputs_of

VOCAB = 30
VERIFICATIONS: list[Verification] = ["match", "rejection", "block"]
CHAINS = DraftInputs(
    sequence=np.array([1, 3], np.int32),
    first_row=np.array([1, 5]),
    num_drafts=np.array([2, 3], np.int32),
    token_ids=np.array([4, 5, 6, 7, 8]),
)
TREES = replace(CHAINS, parents=np.array([-1, 0, -1, -1, 0], np.int32))
NUM_ROWS = 9  # of sequences that have 1, 1 + 2, 1 and 1 + 3 of them
SEQUENCES = (range(1), range(1, 4), range(4, 5), range(5, 9))


def logits_and_rows(*, sampled: bool) -> tuple[torch.Tensor, list[Row]]:
    """Rows in which drafts are likely, each with parameters of its own."""
    logits = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(2))
    for row, token_id in ((1, 4), (2, 5), (5, 6), (6, 8), (7, 8)):
        logits[row, token_id] += 5
    rows = [
        Row(temperature=0.8 if sampled else 0.0, seed=row % 3, num_logprobs=row % 4 - 1, top_k=row)
        for row in range(NUM_ROWS)
    ]
    return logits, rows


def cursed(inputs: SamplingInputs, *rows: int) -> SamplingInputs:
    top_k = inputs.top_k.copy()
    top_k[list(rows)] = CURSED
    return replace(inputs, top_k=top_k)


def path_of(verified: Verified, index: int) -> tuple[int, int, list[int]]:
    """What a sequence with drafts got accepted: how many, up to where, and which."""
    paths = verified.paths
    assert paths is not None
    counts = paths.num_accepted.tolist()
    first = sum(counts[:index])
    drafts = list(range(counts[index]))
    if paths.drafts is not None:
        drafts = paths.drafts[first : first + counts[index]].tolist()
    return counts[index], int(paths.last_row[index]), drafts


CASES = [
    pytest.param(
        verification, sampled, drafts, id=f"{verification}-{name}-{'sampled' if sampled else 'greedy'}"
    )
    for verification in VERIFICATIONS
    for sampled in (False, True)
    for name, drafts in (("none", None), ("chains", CHAINS), ("trees", TREES))
    # A tree anywhere has all judged by the token rule: there the law is the same, but not the tokens.
    if (verification, sampled, name) != ("block", True, "trees")
]


@pytest.mark.parametrize(("verification", "sampled", "drafts"), CASES)
def test_the_others_get_what_they_would_have_got(
    verification: Verification, sampled: bool, drafts: DraftInputs | None
) -> None:
    logits, rows = logits_and_rows(sampled=sampled)
    inputs = inputs_of(rows)
    verifier = make_verifier(verification, FaultySampler(VOCAB, CPU))
    whole = make_verifier(verification, Sampler(VOCAB, CPU)).draw(logits, inputs, drafts)
    sequences = SEQUENCES if drafts is not None else tuple(range(row, row + 1) for row in range(NUM_ROWS))
    for bad in range(len(sequences)):
        victim = sequences[bad][0]
        found = draw_isolated(verifier, logits, cursed(inputs, victim), drafts)
        assert found.rows.row_errors == {victim: "drawing its next token failed (RuntimeError)"}
        assert whole.rows.logprobs is not None and found.rows.logprobs is not None
        for index, own in enumerate(sequences):
            tokens = [found.rows.token_ids[row] for row in own]
            if index == bad:
                assert tokens == [NO_TOKEN] * len(own)
                continue
            assert tokens == [whole.rows.token_ids[row] for row in own]
            assert [found.rows.logprobs[row] for row in own] == [whole.rows.logprobs[row] for row in own]
        if drafts is None:
            assert found.paths is None
            continue
        for index, own in enumerate((SEQUENCES[1], SEQUENCES[3])):
            if own is sequences[bad]:
                assert path_of(found, index) == (0, victim, [])
            else:
                assert path_of(found, index) == path_of(whole, index)
    if drafts is CHAINS:
        assert path_of(whole, 0)[0] > 0, "something is accepted at all"


def test_a_row_that_fails_in_the_midst_of_drafts_fails_its_sequence() -> None:
    logits, rows = logits_and_rows(sampled=False)
    verifier = make_verifier("match", FaultySampler(VOCAB, CPU))
    found = draw_isolated(verifier, logits, cursed(inputs_of(rows), 7), CHAINS)
    assert list(found.rows.row_errors or {}) == [5]


def test_all_may_fail_and_still_each_for_itself() -> None:
    logits, rows = logits_and_rows(sampled=False)
    verifier = make_verifier("match", FaultySampler(VOCAB, CPU))
    found = draw_isolated(verifier, logits, cursed(inputs_of(rows), 0, 1, 4, 5), CHAINS)
    assert list(found.rows.row_errors or {}) == [0, 1, 4, 5]
    assert found.rows.token_ids == [NO_TOKEN] * NUM_ROWS


def test_rows_with_errors_and_spoiled_rows_keep_their_places() -> None:
    logits, rows = logits_and_rows(sampled=False)
    logits[4] = logits[8] = torch.nan  # a row alone; and one behind the end of what its drafts commit
    inputs = inputs_of(rows)
    drafts = replace(CHAINS, token_ids=np.array([4, 5, 1, 7, 8]))  # the second chain is wrong at once
    whole = make_verifier("match", Sampler(VOCAB, CPU)).draw(logits, inputs, drafts)
    assert (list(whole.rows.row_errors or {}), whole.rows.spoiled_rows) == ([4], (8,))
    verifier = make_verifier("match", FaultySampler(VOCAB, CPU))
    found = draw_isolated(verifier, logits, cursed(inputs, 1), drafts)
    assert (list(found.rows.row_errors or {}), found.rows.spoiled_rows) == ([1, 4], (8,))


class Counting:
    """A verifier that counts its calls, and raises what it is told to at chosen ones."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors = errors
        self.num_calls = 0

    def draw(self, logits: torch.Tensor, sampling: Any, drafts: Any) -> Verified:
        self.num_calls += 1
        if self.num_calls in self.errors:
            raise self.errors[self.num_calls]
        return Verified(SampledRows([0] * len(logits)))


def test_rows_are_drawn_for_apart_only_when_they_must_be() -> None:
    logits, rows = logits_and_rows(sampled=False)
    verifier = Counting({})
    draw_isolated(verifier, logits, inputs_of(rows), None)
    assert verifier.num_calls == 1
    verifier = Counting({1: ValueError("once")})
    assert draw_isolated(verifier, logits, inputs_of(rows), None).rows.row_errors is None
    assert verifier.num_calls == 1 + NUM_ROWS


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()])
def test_no_room_is_nobodys_fault(call: int, error: Exception) -> None:
    logits, rows = logits_and_rows(sampled=False)
    verifier = Counting({1: ValueError("once"), call: error})
    with pytest.raises(type(error)):
        draw_isolated(verifier, logits, inputs_of(rows), None)
