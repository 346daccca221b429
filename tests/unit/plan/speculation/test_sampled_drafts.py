"""The law under a grammar, and where drafts end: how many are verified must not depend on what they are.

Drafts go through the real decoder and the real verifiers; the target's masks are those of a grammar that the
drafter knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np
import pytest
import torch

from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verifier import make_verifier
from engine.plan.grammar import TokenMask
from engine.plan.request import Request
from engine.plan.speculation.draft_tape import DraftedSequence
from engine.plan.speculation.drafter import Draft
from engine.plan.speculation.length_policy import Candidate, FixedPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig, Verification
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import Int64
from tests.support.factories import make_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.sampling_reference import CPU, Row
from tests.support.verification_law import (
    Known,
    Proposal,
    Propose,
    World,
    generate,
    law_p,
    stepwise,
    target_law,
)

VOCAB, NUM_TOKENS, WIDTH, LAST = 3, 3, 2, 2
FORBIDDEN = np.eye(VOCAB, dtype=np.bool_)  # no token twice in a row
# Of the token before, the one after that and the one after that: the residual is far from the target's law.
TARGET, DRAFTER = (0.4, 0.18, 0.42), (0.4, 0.45, 0.15)


def world() -> World:
    turned = [
        [np.roll(law, last) for _ in range(VOCAB) for last in range(VOCAB)] for law in (TARGET, DRAFTER)
    ]
    target, drafter = (torch.from_numpy(np.log(np.stack(laws))).float() for laws in turned)
    return World(target, drafter, FORBIDDEN)


WORLD = world()
LAW = target_law(WORLD, Row(), NUM_TOKENS)


@dataclass
class NoTwice:
    """The grammar: where a reply stands in it follows from its last token."""

    request: Request
    is_dear: bool = False

    def num_valid(self, token_ids: Sequence[int]) -> int:
        tokens = [self.request.token_ids[-1], *token_ids]
        return len(list(takewhile(lambda pair: not FORBIDDEN[pair], pairwise(tokens))))

    def mask(self, path: Sequence[int]) -> TokenMask:
        raise NotImplementedError

    def foresee(self, token_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def accept(self, token_id: int) -> bool:
        raise NotImplementedError


class AllOrNothing(FixedPolicy):
    """Verifies whole drafts only, as a policy does to which short ones promise too little."""

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        lengths = super().lengths(candidates, load)
        return [length if length == WIDTH else 0 for length in lengths]


def decoded(base: Propose, policy: type[FixedPolicy], *, ends: bool = False) -> Propose:
    """The drafts of `base`, as many of each as the decoder verifies; with `ends` LAST is a chain's last."""

    def propose(known: Known) -> Proposal:
        proposal = base(known)
        config = SpeculationConfig(VOCAB, WIDTH, length_policy="fixed", min_acceptance_rate=0.0)
        costs = PassCosts()
        source = DraftSource(FakeDrafter(method="draft_model"), WIDTH)
        decoder = SpeculativeDecoder(config, [source], policy(config), costs)
        requests = [open_request(decoder, known, place) for place in range(len(known.seeds))]
        jobs = decoder.links[0].jobs(ahead=False)
        assert len(jobs) == len(requests)
        for place, job in enumerate(jobs):
            token_ids = up_to_last(proposal.token_ids[place]) if ends else proposal.token_ids[place]
            laws = () if proposal.probs is None else tuple(proposal.probs[place][: len(token_ids)])
            request_id, tokens = job.request.request_id, tuple(token_ids.tolist())
            decoder.links[0].put(job, Draft(request_id, job.epoch, job.next_position, tokens, probs=laws))
        load = StepLoad(len(requests), len(requests), 0, max_draft_tokens=WIDTH * len(requests))
        chosen = {request.request_id: len(drafts) for request, drafts in decoder.choose(requests, load)}
        return replace(proposal, num_drafts=np.array([chosen.get(r.request_id, 0) for r in requests]))

    return propose


def open_request(decoder: SpeculativeDecoder, known: Known, place: int) -> Request:
    request = make_request(str(place), known.tokens[place, : known.counts[place]].tolist(), max_tokens=50)
    request.grammar = NoTwice(request)
    request.num_computed_tokens = len(request.token_ids) - 1
    decoder.open(request)
    return request


def up_to_last(token_ids: Int64) -> Int64:
    places = np.flatnonzero(token_ids == LAST)
    return token_ids[: places[0] + 1] if len(places) else token_ids


def p_of(verification: Verification, propose: Propose, num_sequences: int = 700) -> float:
    verifier = make_verifier(verification, Sampler(VOCAB, CPU))
    return law_p(generate(WORLD, Row(), verifier, propose, num_sequences, NUM_TOKENS), LAW, VOCAB)


SAMPLED = decoded(stepwise(WIDTH, "sampled"), FixedPolicy)
PICKY = decoded(stepwise(WIDTH, "sampled"), AllOrNothing)
ENDING = decoded(stepwise(WIDTH, "sampled"), AllOrNothing, ends=True)
PROPOSALS = {
    "sampled": SAMPLED,
    "mixed with certain ones": decoded(stepwise(WIDTH, "mixed"), FixedPolicy),
    "certain": decoded(stepwise(WIDTH, "ngram"), FixedPolicy),
    "all or nothing": PICKY,
    "ending": ENDING,
}


@pytest.mark.by_default
@pytest.mark.parametrize("drafts", PROPOSALS)
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_law_holds_where_a_grammar_forbids_drafts(verification: Verification, drafts: str) -> None:
    assert p_of(verification, PROPOSALS[drafts]) > 1e-3


def test_a_certain_draft_that_is_forbidden_is_not_verified() -> None:
    assert verified((1, 2, 2, 1), None) == 2


def test_the_first_sampled_draft_that_is_forbidden_is_verified_and_none_after_it() -> None:
    assert verified((1, 2, 2, 1), torch.full((VOCAB,), 1 / VOCAB)) == 3


def verified(token_ids: tuple[int, ...], law: torch.Tensor | None) -> int:
    """How many of these drafts after token 0 go into a step."""
    config = SpeculationConfig(VOCAB, len(token_ids), length_policy="fixed", min_acceptance_rate=0.0)
    source = DraftSource(FakeDrafter(method="draft_model"), len(token_ids))
    decoder = SpeculativeDecoder(config, [source], FixedPolicy(config), PassCosts())
    request = make_request("a", [1, 0], max_tokens=50)
    request.grammar = NoTwice(request)
    request.num_computed_tokens = 1
    decoder.open(request)
    (job,) = decoder.links[0].jobs(ahead=False)
    laws = () if law is None else (law,) * len(token_ids)
    decoder.links[0].put(job, Draft("a", job.epoch, job.next_position, token_ids, probs=laws))
    ((_, drafts),) = decoder.choose([request], StepLoad(1, 1, 0, max_draft_tokens=99))
    return len(drafts)


# Negative controls: what was done before, and what suggests itself.


def dropped(self: DraftedSequence, num_chosen: int) -> int:
    """The forbidden draft itself is dropped, too."""
    return self._num_allowed(min(len(self.tape), num_chosen))


def what_is_there(self: DraftedSequence, room: int) -> int:
    """The policy is told how many drafts there are."""
    return min(len(self.tape), room)


def what_is_allowed(self: DraftedSequence, room: int) -> int:
    """The policy is told how many drafts the grammar leaves, the first forbidden one included."""
    num_drafts = min(len(self.tape), room)
    return min(num_drafts, self._num_allowed(num_drafts) + 1)


@pytest.mark.by_default
@pytest.mark.parametrize(
    ("method", "mistake", "propose"),
    [
        ("num_verified", dropped, SAMPLED),
        ("num_offered", what_is_there, ENDING),
        ("num_offered", what_is_allowed, PICKY),
    ],
)
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_rejects_a_number_that_depends_on_the_drafts(
    verification: Verification,
    method: str,
    mistake: Callable[[DraftedSequence, int], int],
    propose: Propose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftedSequence, method, mistake)
    assert p_of(verification, propose) < 1e-6


def test_match_needs_none_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftedSequence, "num_verified", dropped)
    assert p_of("match", SAMPLED) > 1e-3
