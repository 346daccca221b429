"""The Medusa drafter: a tree for every job with features, the same alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.drafters import medusa
from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.medusa import MedusaDrafter, as_tensor, couple
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.sampling.noise import gumbel
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Draft, Drafter, DraftJob, DraftRequest, TargetFeatures
from tests.support.packed import load_tiny

TREE = DraftTree.of_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,), (0, 0, 1)])


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    generator = torch.Generator().manual_seed(1)
    made = MedusaHeads(load_tiny("llama"), 3, torch.arange(1, 512, 2), TREE)
    for parameter in made.heads.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return made


def make_job(
    name: str = "a",
    *,
    position: int | None = 4,
    num_known: int = 5,
    num_wanted: int = 8,
    stop_token_ids: frozenset[int] = frozenset(),
    **sampling: Any,
) -> DraftJob:
    """A job whose newest known token is `num_known` - 1, with features of the token at `position`."""
    hidden = torch.randn(64, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    params = SamplingParams(max_tokens=20, **{"temperature": 0.0} | sampling)
    return DraftJob(
        request=DraftRequest(name, 2, params, stop_token_ids),
        epoch=7,
        first=0,
        token_ids=tuple(range(num_known)),
        num_committed=num_known,
        num_wanted=num_wanted,
        features=() if position is None else (TargetFeatures(position, hidden[None]),),
    )


def draft(heads: MedusaHeads, *jobs: DraftJob) -> Sequence[Draft]:
    result = MedusaDrafter(heads).draft(jobs)
    assert result.draft_s > 0
    assert [answer.request_id for answer in result.drafts] == [job.request.request_id for job in jobs]
    return result.drafts


def test_it_is_a_drafter_that_reads_features(heads: MedusaHeads) -> None:
    drafter: Drafter = MedusaDrafter(heads)
    assert (drafter.method, drafter.is_cheap, drafter.is_stepwise, drafter.reads_features) == (
        "medusa",
        False,
        True,
        True,
    )
    drafter.close(["nobody"])


def test_a_greedy_tree_holds_each_heads_best_guesses(heads: MedusaHeads) -> None:
    job = make_job()
    (answer,) = draft(heads, job)
    assert (answer.epoch, answer.first, answer.probs, answer.is_behind) == (7, 5, (), False)
    assert answer.parents == TREE.parents
    hidden = as_tensor(job.features[-1].hidden)
    order = heads(hidden)[0].argsort(descending=True)  # [K, n]
    guesses = heads.token_ids[order].tolist()
    expected = [guesses[depth][rank] for depth, rank in zip(TREE.depths, TREE.ranks, strict=True)]
    assert list(answer.token_ids) == expected


@pytest.mark.parametrize("num_wanted", range(1, 10))
def test_a_tree_is_cut_to_what_is_wanted_and_stays_one(heads: MedusaHeads, num_wanted: int) -> None:
    (answer,) = draft(heads, make_job(num_wanted=num_wanted))
    (whole,) = draft(heads, make_job())
    count = min(num_wanted, 8)
    assert answer.token_ids == whole.token_ids[:count]
    parents = answer.parents or tuple(range(-1, count - 1))
    assert parents == TREE.parents[:count]
    siblings = set(zip(parents, answer.token_ids, strict=True))
    assert len(siblings) == count


def test_a_tree_without_branches_is_a_chain(heads: MedusaHeads) -> None:
    drafter = MedusaDrafter(heads, DraftTree.chain(3))
    (answer,) = drafter.draft([make_job()]).drafts
    assert answer.parents is None
    assert len(answer.token_ids) == 3


def test_nothing_follows_a_stop_token(heads: MedusaHeads) -> None:
    (whole,) = draft(heads, make_job())
    stop = whole.token_ids[0]
    (answer,) = draft(heads, make_job(stop_token_ids=frozenset({stop})))
    assert answer.parents is not None
    kept = [path for path in TREE.paths if len(path) == 1 or path[0] != 0]
    assert len(answer.token_ids) == len(kept)
    for token_id, parent in zip(answer.token_ids, answer.parents, strict=True):
        assert parent < len(answer.token_ids)
        assert parent == -1 or answer.token_ids[parent] != stop
        assert token_id in whole.token_ids
    assert (
        draft(heads, make_job(stop_token_ids=frozenset({stop}), num_wanted=2))[0].token_ids
        == (whole.token_ids[:2])
    )


def test_without_usable_features_the_answer_is_empty(heads: MedusaHeads) -> None:
    missing = make_job("a", position=None)
    unwanted = make_job("b", num_wanted=0)
    ahead = make_job("c", position=5)  # speaks of a token that the job does not know
    sound = make_job("d")
    answers = draft(heads, missing, unwanted, ahead, sound)
    assert [len(answer.token_ids) for answer in answers] == [0, 0, 0, 8]
    assert [answer.first for answer in answers] == [5, 5, 5, 5]
    assert draft(heads) == ()


def test_older_features_answer_for_their_own_position(heads: MedusaHeads) -> None:
    (answer,) = draft(heads, make_job(position=2))
    assert answer.first == 3
    assert answer.token_ids == draft(heads, make_job())[0].token_ids


def test_a_batch_answers_as_each_alone(heads: MedusaHeads) -> None:
    jobs = [
        make_job("a"),
        make_job("b", temperature=0.7, seed=3),
        make_job("c", position=None),
        make_job("d", temperature=1.2, seed=2**64 - 5, num_wanted=3),
        make_job("e", position=3),
    ]
    together = draft(heads, *jobs)
    alone = [draft(heads, job)[0] for job in jobs]
    assert list(together) == alone
    assert list(draft(heads, *jobs[::-1])) == alone[::-1]


def test_scores_are_worked_on_a_few_sequences_at_a_time(
    heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of 256 that sample, 64 bits for each head and token, would be gigabytes."""
    jobs = [make_job(name, temperature=0.7, seed=3) for name in "abcde"]
    whole = draft(heads, *jobs)
    seen: list[int] = []

    def watched(logits: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(len(logits))
        return couple(logits, *more)

    monkeypatch.setattr(medusa, "couple", watched)
    monkeypatch.setattr("engine.compute.sampling.row_groups.GROUP_LOGITS", 2 * 3 * len(heads.token_ids))
    assert list(draft(heads, *jobs)) == list(whole)
    assert seen == [2, 2, 1]


def test_a_sampled_tree_holds_the_draws_of_the_positions_own_noise(heads: MedusaHeads) -> None:
    job = make_job(position=9, num_known=10, temperature=0.8, seed=11)
    (answer,) = draft(heads, job)
    hidden = as_tensor(job.features[-1].hidden)
    logits = heads(hidden)[0].double()  # [K, n]
    for node, (depth, rank) in enumerate(zip(TREE.depths, TREE.ranks, strict=True)):
        position = np.array([10 + depth])
        noise = gumbel(np.array([11]), position, heads.token_ids)[0]
        order = (logits[depth] / 0.8 + noise).argsort(descending=True)
        assert answer.token_ids[node] == int(heads.token_ids[order[rank]])


def test_without_coupling_a_sampled_tree_is_the_likeliest_one_whatever_the_seed(heads: MedusaHeads) -> None:
    drafter = MedusaDrafter(heads, couples=False)
    jobs = [make_job(temperature=2.0, seed=seed) for seed in range(4)]
    drafts = [drafter.draft([job]).drafts[0] for job in jobs]
    assert {answer.token_ids for answer in drafts} == {draft(heads, make_job())[0].token_ids}


def test_coupling_agrees_with_the_target_more_often_than_the_likeliest_guess(heads: MedusaHeads) -> None:
    """Where a head has the target's very law, its first guess is the target's draw; the mode often is not."""
    fresh = MedusaHeads(load_tiny("llama"), 1, torch.arange(512), DraftTree.chain(1))
    jobs = [make_job(f"r{i}", temperature=1.0, seed=i, position=i, num_known=i + 1) for i in range(40)]
    sampled = draft(fresh, *jobs)
    modes = draft(fresh, *(make_job(f"r{i}", position=i, num_known=i + 1) for i in range(40)))
    coupled_hits = mode_hits = 0
    for job, answer, mode in zip(jobs, sampled, modes, strict=True):
        assert fresh.projection is not None
        logits = fresh.projection(as_tensor(job.features[-1].hidden)[-1]).double()
        position = np.array([answer.first])
        drawn = logits + gumbel(np.array([job.request.sampling.seed]), position, torch.arange(512))[0]
        coupled_hits += answer.token_ids[0] == int(drawn.argmax())
        mode_hits += mode.token_ids[0] == int(drawn.argmax())
    assert coupled_hits == 40
    assert mode_hits < 40


def test_a_tree_beyond_the_heads_is_refused(heads: MedusaHeads) -> None:
    with pytest.raises(ValueError, match="a tree of depth 4 for 3 heads"):
        MedusaDrafter(heads, DraftTree.chain(4))
