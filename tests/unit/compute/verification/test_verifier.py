"""What a step commits, row by row: order, errors, spoiled rows, log-probabilities, paths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.verified import Draws, Verified, commit_drafts, commit_rows
from engine.compute.verification.verifier import make_verifier
from engine.plan.speculation.speculation_config import Verification
from engine.plan.step_records import NO_TOKEN, DraftInputs, SampledRows, SamplingInputs
from tests.support.sampling_reference import CPU, Row, adjusted, inputs_of

VOCAB = 50
GREEDY = Row(temperature=0)
VERIFICATIONS: list[Verification] = ["match", "rejection", "block"]


def logits_for(tokens: list[int], gap: float = 60.0) -> torch.Tensor:
    """Rows of logits in which these tokens are as good as certain."""
    logits = torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(1))
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] += gap
    return logits


def drafts_at(first_row: list[int], chains: list[list[int]], **fields: Any) -> DraftInputs:
    return DraftInputs(
        sequence=np.arange(len(chains), dtype=np.int32),
        first_row=np.array(first_row),
        num_drafts=np.array([len(chain) for chain in chains], np.int32),
        token_ids=np.array([token for chain in chains for token in chain]),
        **fields,
    )


def tree_of(parents: list[int]) -> dict[str, Any]:
    return {"parents": np.array(parents, np.int32)}


def verify(
    verification: Verification, logits: torch.Tensor, rows: list[Row], drafts: DraftInputs | None
) -> Verified:
    before = logits.clone()
    sampler = Sampler(VOCAB, CPU)
    result = make_verifier(verification, sampler).draw(logits, inputs_of(rows), drafts)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return result


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_k=5)])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_without_drafts_it_is_the_sampler(verification: Verification, row: Row) -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(5))
    rows = [replace(row, seed=seed, num_logprobs=seed % 3 - 1) for seed in range(9)]
    result = verify(verification, logits, rows, None)
    assert result.rows == Sampler(VOCAB, CPU).sample(logits, inputs_of(rows))
    assert result.paths is None


@given(data=st.data())
def test_drafts_are_committed_alike_one_by_one_and_as_arrays(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    plain = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    first_row, row = [], 0
    for length, before in zip(lengths, plain, strict=True):
        first_row.append(row + before)
        row += before + length + 1
    tokens = st.integers(0, 1)  # few, so that many agree
    chains = [data.draw(st.lists(tokens, min_size=length, max_size=length)) for length in lengths]
    drafts = drafts_at(first_row, chains)
    if data.draw(st.booleans()):
        trees = [[data.draw(st.integers(-1, draft - 1)) for draft in range(length)] for length in lengths]
        drafts = drafts_at(first_row, chains, **tree_of([parent for tree in trees for parent in tree]))
    drawn = data.draw(st.lists(tokens, min_size=row, max_size=row))
    rows, draws = DraftRows.of(drafts), Draws(np.array(drawn), {})
    expected = commit_rows(None, inputs_of([GREEDY] * row), rows, draws, rows.follow(draws.token_ids))
    found = commit_drafts(drafts, SampledRows(list(drawn)))
    assert found.rows == expected.rows
    assert found.paths is not None and expected.paths is not None
    assert found.paths.num_accepted.tolist() == expected.paths.num_accepted.tolist()
    assert found.paths.last_row.tolist() == expected.paths.last_row.tolist()
    if rows.are_chains:
        assert expected.paths.drafts is None
        counts = found.paths.num_accepted.tolist()
        firsts = [draft for count in counts for draft in range(count)]
        assert found.paths.drafts is None or found.paths.drafts.tolist() == firsts
    else:
        assert found.paths.drafts is not None and expected.paths.drafts is not None
        assert found.paths.drafts.tolist() == expected.paths.drafts.tolist()


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_p=0.9)])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_chains_between_plain_rows(verification: Verification, row: Row) -> None:
    """A plain row, a chain accepted whole, one cut at its second draft, a plain row, one refused whole."""
    logits = logits_for([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    drafts = drafts_at([1, 4, 9], [[2, 3], [5, 0, 7], [30]])
    result = verify(verification, logits, [row] * 11, drafts)
    no = NO_TOKEN
    assert result.rows.token_ids == [1, 2, 3, 4, 5, 6, no, no, 9, 10, no]
    assert result.rows.row_errors is None and result.rows.spoiled_rows == ()
    assert result.paths is not None and result.paths.drafts is None
    assert result.paths.num_accepted.tolist() == [2, 1, 0]
    assert result.paths.last_row.tolist() == [3, 5, 9]


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(min_p=0.1)])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_trees(verification: Verification, row: Row) -> None:
    """The second child of the root, then its second child, a leaf; then a chain in the clothes of a tree."""
    #         root      1: child 8  2: child 9     3: after 8  4: after 9  5: after 9   6: plain   7: chain
    logits = logits_for([9, 20, 12, 21, 22, 33, 40, 41, 42])
    drafts = drafts_at([0, 7], [[8, 9, 9, 11, 12], [41]], **tree_of([-1, -1, 0, 1, 1, -1]))
    result = verify(verification, logits, [row] * 9, drafts)
    no = NO_TOKEN
    assert result.rows.token_ids == [9, 12, 33, no, no, no, 40, 41, 42]
    assert result.paths is not None and result.paths.drafts is not None
    assert result.paths.num_accepted.tolist() == [2, 1]
    assert result.paths.drafts.tolist() == [1, 4, 0]
    assert result.paths.last_row.tolist() == [5, 8]


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(top_k=9)])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_logprobs_are_the_targets_in_the_order_of_commit(verification: Verification, row: Row) -> None:
    logits = logits_for([9, 20, 12, 21, 22, 33, 40], gap=25.0)
    rows = [replace(adjusted(row, logit_bias=((3, -5.0),)), num_logprobs=2)] * 7
    drafts = drafts_at([0], [[8, 9, 9, 11, 12]], **tree_of([-1, -1, 0, 1, 1]))
    result = verify(verification, logits, rows, drafts)
    assert result.rows.token_ids == [9, 12, 33, *[NO_TOKEN] * 3, 40] and result.rows.logprobs is not None
    for place, source in ((0, 0), (1, 2), (2, 5), (6, 6)):
        record, expected = result.rows.logprobs[place], torch.log_softmax(logits[source], dim=0)
        assert record is not None and len(record.top) == 2 and record.rank == 1
        assert record.token_id == result.rows.token_ids[place]
        assert record.logprob == pytest.approx(float(expected[record.token_id]), abs=1e-6)
    assert result.rows.logprobs[3:6] == (None,) * 3


@pytest.mark.parametrize("row", [GREEDY, Row(), replace(GREEDY, num_logprobs=1)])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_a_failed_row_ends_its_sequence_where_it_is_reached(verification: Verification, row: Row) -> None:
    logits = logits_for([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    logits[2, 7], logits[5], logits[9, 3] = math.nan, -math.inf, math.inf
    drafts = drafts_at([0, 4, 8], [[1, 2, 3], [5, 6, 7], [30]])
    rows = verify(verification, logits, [row] * 10, drafts).rows
    reason = "the logits hold NaN or infinity"
    # The first fails after two drafts, the second after one, the third in a row that it does not reach.
    assert rows.row_errors == {2: reason, 5: reason}
    committed = [token for place, token in enumerate(rows.token_ids) if place not in rows.row_errors]
    assert committed == [1, 2, NO_TOKEN, 5, NO_TOKEN, NO_TOKEN, 9, NO_TOKEN]
    assert rows.spoiled_rows == (9,)
    if row.num_logprobs >= 0:
        assert rows.logprobs is not None
        assert [record is not None for record in rows.logprobs] == [1, 1, 0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("row", [GREEDY, Row()])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_a_failed_row_of_a_tree_stands_in_the_order_of_commit(verification: Verification, row: Row) -> None:
    logits = logits_for([9, 20, 12, 21])
    logits[2, 0] = logits[1, 0] = math.nan
    drafts = drafts_at([0], [[8, 9, 12]], **tree_of([-1, -1, 1]))
    result = verify(verification, logits, [row] * 4, drafts)
    assert list(result.rows.row_errors or ()) == [1]
    assert result.rows.token_ids[0] == 9 and result.rows.token_ids[2:] == [NO_TOKEN] * 2
    assert result.rows.spoiled_rows == (1,)
    assert result.paths is not None and result.paths.num_accepted.tolist() == [1]


@pytest.mark.parametrize("row", [GREEDY, Row()])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_bad_data_is_an_error_where_it_is_reached_and_spoils_nothing(
    verification: Verification, row: Row
) -> None:
    logits = logits_for([1, 2, 3, 4, 5])
    bad = adjusted(row, allowed_token_ids=())
    result = verify(verification, logits, [row, bad, row, row, bad], drafts_at([0, 3], [[1, 2], [30]]))
    assert result.rows.row_errors is not None
    (reason,) = result.rows.row_errors.values()
    assert list(result.rows.row_errors) == [1] and reason.startswith("no token is left")
    assert result.rows.token_ids[0] == 1 and result.rows.token_ids[2:] == [NO_TOKEN, 4, NO_TOKEN]
    assert result.rows.spoiled_rows == ()


@pytest.mark.parametrize("row", [GREEDY, Row()])
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_every_row_bad_is_no_crash(verification: Verification, row: Row) -> None:
    logits = torch.full((4, VOCAB), math.nan)
    rows = verify(verification, logits, [row] * 4, drafts_at([0, 2], [[1], [2]])).rows
    assert sorted(rows.row_errors or ()) == [0, 2] and rows.spoiled_rows == (1, 3)
    assert rows.token_ids[1::2] == [NO_TOKEN] * 2


def test_greedy_sequences_are_matched_beside_sampled_ones() -> None:
    """Under the other rules too: their rows need no law, and any recorded one is passed over."""
    law = torch.full((VOCAB,), 1 / VOCAB)
    logits = logits_for([1, 2, 3, 4, 5])
    drafts = drafts_at([0, 3], [[1, 2], [4]], probs=(law, law, law))
    for verification in VERIFICATIONS:
        result = verify(verification, logits, [GREEDY] * 3 + [Row()] * 2, drafts)
        assert result.rows.token_ids == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_laws_that_lie_cost_drafts_only(verification: Verification) -> None:
    """Not numbers, zeros, no law at all: what is committed is still something the target can say."""
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, :3] = 0.0
    for value in (math.nan, 0.0, math.inf, -1.0):
        law = torch.full((VOCAB,), value)
        for seed in range(20):
            drafts = drafts_at([0], [[seed % 5]], probs=(law,))
            rows = verify(verification, logits, [Row(seed=seed), Row(seed=seed, position=1)], drafts).rows
            assert rows.row_errors is None
            assert set(rows.token_ids) <= {0, 1, 2, NO_TOKEN} and rows.token_ids[0] != NO_TOKEN


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_groups_of_sequences_change_nothing(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 5, 30)
    chains = [rng.integers(0, 8, count).tolist() for count in counts]
    first = np.cumsum(counts + 1) - counts - 1
    logits = torch.randn(int((counts + 1).sum()), VOCAB, generator=torch.Generator().manual_seed(4))
    logits[:, :8] += 4
    heat = [1.0, 1.0, 0.0] * 10  # greedy ones are matched
    rows = [
        Row(seed=i, position=int(i - s), temperature=heat[number])
        for number, (s, count) in enumerate(zip(first, counts, strict=True))
        for i in range(s, s + count + 1)
    ]
    drafts = drafts_at(first.tolist(), chains)
    whole = verify(verification, logits, rows, drafts)
    drawn, sample = [], Sampler.sample

    def watched(self: Sampler, logits: torch.Tensor, inputs: SamplingInputs) -> SampledRows:
        drawn.append(len(logits))
        return sample(self, logits, inputs)

    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(Sampler, "sample", watched)
    parts = verify(verification, logits, rows, drafts)
    assert whole.rows == parts.rows and len(set(whole.rows.token_ids)) > 5
    assert len(drawn) > 1 and max(drawn) == 7 and sum(drawn) == sum(row.temperature == 0 for row in rows)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_drafts_from_the_targets_own_law_are_always_accepted(verification: Verification) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4)).repeat(100, 1)
    rows = [Row(seed=i // 2, position=7 + i % 2, top_p=0.9) for i in range(200)]
    sampler = Sampler(VOCAB, CPU)
    drawn = sampler.sample_with_probs(logits[::2], inputs_of(rows[::2]), np.full(100, 7))
    chains = [[token] for token in drawn.token_ids]
    drafts = drafts_at(list(range(0, 200, 2)), chains, probs=tuple(drawn.probs))
    result = verify(verification, logits, rows, drafts)
    # Only float32's rounding of the recorded law could refuse one.
    assert result.paths is not None and result.paths.num_accepted.tolist() == [1] * 100


def test_a_wrong_shape_is_named() -> None:
    for verification in VERIFICATIONS:
        for drafts in (None, drafts_at([0], [[1]])):
            with pytest.raises(ValueError, match=r"logits have shape \(2, 9\), expected \(2, 50\)"):
                verify(verification, torch.zeros(2, 9), [Row()] * 2, drafts)


@pytest.mark.gpu
@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_the_device_commits_what_the_cpu_commits(verification: Verification) -> None:
    device = torch.device("cuda")
    logits = logits_for([9, 20, 12, 21, 22, 33, 40], gap=2.0)
    law = torch.softmax(logits[0], dim=0)
    for seed in range(50):
        rows = [Row(seed=seed, position=depth, top_p=0.95) for depth in (0, 1, 2, 3, 4, 5, 9)]
        drafts = drafts_at([0], [[9, 20, 12, 21, 22]], probs=(law, None, law, None, None))
        there = replace(drafts, probs=(law.to(device), None, law.to(device), None, None))
        found = make_verifier(verification, Sampler(VOCAB, device)).draw(
            logits.to(device), inputs_of(rows), there
        )
        assert found.rows == verify(verification, logits, rows, drafts).rows


def test_without_logits_the_draws_say_which_failed_rows_are_not_finite() -> None:
    drafts = DraftRows.of(drafts_at([0], [[7, 8, 9]]))  # the first draft is refused: no other row is reached
    draws = Draws(np.array([1, NO_TOKEN, NO_TOKEN, 4]), {1: "one reason", 2: "another"}, frozenset({2}))
    rows = commit_rows(None, inputs_of([GREEDY] * 4), drafts, draws, drafts.follow(draws.token_ids)).rows
    assert rows.token_ids == [1, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert rows.row_errors is None and rows.spoiled_rows == (2,)
