"""Whatever is drafted, `match` commits token for token what plain sampling with the same seed commits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verifier import MatchVerifier, make_verifier
from engine.plan.step_records import Int64, LogitAdjustment, SampledRows, SamplingInputs
from tests.support.examples import share_of
from tests.support.sampling_reference import CPU, Row
from tests.support.verification_law import Known, Proposal, Propose, World, generate, nothing

VOCAB, NUM_TOKENS = 6, 9
MATCH = make_verifier("match", Sampler(VOCAB, CPU))


ADJUSTMENT = st.builds(
    LogitAdjustment,
    row=st.just(0),
    logit_bias=st.sampled_from([(), ((1, 2.0),)]),
    banned_token_ids=st.sampled_from([(), (0,), (2, 3)]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
)
ROW = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.7, 1.2]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-(2**62), 2**62),
    adjustment=st.one_of(st.just(LogitAdjustment(row=0)), ADJUSTMENT),
)
PARENTS = st.lists(st.integers(-1, 5), min_size=1, max_size=6).map(
    lambda wanted: tuple(min(parent, index - 1) for index, parent in enumerate(wanted))
)
PLANS = st.one_of(st.integers(1, 6).map(lambda width: tuple(range(-1, width - 1))), PARENTS)


def guesses(texts: Int64, seeds: Int64, parents: tuple[int, ...], luck: float, generator: int) -> Propose:
    """Drafts that are right with chance `luck` where they can be, else anything; as many as it happens."""
    chain = parents == tuple(range(-1, len(parents) - 1))
    depth = [0] * len(parents)
    for draft, parent in enumerate(parents):
        depth[draft] = 0 if parent < 0 else depth[parent] + 1

    def propose(known: Known) -> Proposal:
        rng = np.random.default_rng([generator, int(known.counts.sum())])
        n = len(known.seeds)
        drafts = rng.integers(0, VOCAB, (n, len(parents)))
        for sequence, seed in enumerate(known.seeds.tolist()):
            text = texts[int(np.flatnonzero(seeds == seed)[0])]
            for draft in range(len(parents)):
                place = int(known.counts[sequence]) - 2 + depth[draft]
                if place < len(text) and rng.random() < luck:
                    drafts[sequence, draft] = text[place]
        return Proposal(drafts, rng.integers(0, len(parents) + 1, n), None if chain else parents)

    return propose


@settings(deadline=None, max_examples=share_of(80))
@given(
    row=ROW,
    parents=PLANS,
    luck=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    generator=st.integers(0, 2**32 - 1),
    size=st.integers(1, 5),
)
def test_any_drafts_leave_the_text_as_it_is(
    row: Row, parents: tuple[int, ...], luck: float, generator: int, size: int
) -> None:
    world = World.of(VOCAB, seed=generator, scale=1.2)
    plain = generate(world, row, MATCH, nothing, size, NUM_TOKENS)
    propose = guesses(plain, row.seed + np.arange(size), parents, luck, generator)
    assert generate(world, row, MATCH, propose, size, NUM_TOKENS).tolist() == plain.tolist()


@pytest.mark.parametrize("mistake", ["one noise a round", "penalties stand still"])
def test_rejects_a_match_that_is_another_text(mistake: str) -> None:
    """Negative control: rows share noise, or do not know the drafts before them."""

    class OneNoise(Sampler):
        def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledRows:
            return super().sample(logits, replace(inputs, position=inputs.position // 4))

    row = Row(adjustment=LogitAdjustment(row=0, frequency_penalty=1.0))
    world, seeds = World.of(VOCAB, seed=1, scale=1.2), np.arange(40)
    plain = generate(world, row, MATCH, nothing, 40, NUM_TOKENS)
    propose = guesses(plain, seeds, (-1, 0, 1), 0.9, 3)
    if mistake == "one noise a round":
        found = generate(world, row, MatchVerifier(OneNoise(VOCAB, CPU)), propose, 40, NUM_TOKENS)
    else:
        found = generate(world, row, MATCH, propose, 40, NUM_TOKENS, frozen_penalties=True)
    assert (found != plain).any(axis=1).mean() > 0.2
