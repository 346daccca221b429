"""The joint law of the first tokens that each verifier commits over several rounds is plain decoding's."""

from __future__ import annotations

import pytest

from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verifier import make_verifier
from engine.plan.speculation.speculation_config import Verification
from tests.support.sampling_reference import CPU, Row, adjusted
from tests.support.verification_law import Propose, World, generate, law_p, stepwise, target_law, tree

VOCAB, NUM_TOKENS = 3, 4  # more than a round can commit of two drafts
WORLD = World.of(VOCAB, seed=3, scale=1.0, distance=1.5)
SETTINGS = {
    "plain": Row(),
    "temperature": Row(temperature=0.6),
    "top-k": Row(top_k=2),
    "top-p": Row(top_p=0.85, temperature=1.2),
    "min-p": Row(min_p=0.25),
    "penalties": adjusted(Row(), repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "bias": adjusted(Row(), logit_bias=((1, 1.0), (2, -0.5))),
}
PROPOSALS = {
    "sampled": stepwise(2, "sampled"),
    "greedy": stepwise(2, "greedy"),
    "ngram": stepwise(2, "ngram"),
    "coupled": stepwise(2, "coupled"),
    "mixed": stepwise(2, "mixed"),
    "tree": tree("ranked"),
    "siblings": tree("siblings"),
}


def p_of(verification: Verification, setting: str, propose: Propose, num_sequences: int, seed: int) -> float:
    row = Row(**{**vars(SETTINGS[setting]), "seed": seed})
    verifier = make_verifier(verification, Sampler(VOCAB, CPU))
    tokens = generate(WORLD, row, verifier, propose, num_sequences, NUM_TOKENS)
    return law_p(tokens, target_law(WORLD, row, NUM_TOKENS), VOCAB)


@pytest.mark.by_default
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
def test_the_law_of_several_rounds(verification: Verification, setting: str) -> None:
    assert p_of(verification, setting, PROPOSALS["mixed"], 1000, seed=0) > 1e-3


@pytest.mark.by_default
@pytest.mark.parametrize("setting", ["top-k", "penalties"])
@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_the_law_of_trees_over_several_rounds(verification: Verification, setting: str) -> None:
    assert p_of(verification, setting, PROPOSALS["siblings"], 1000, seed=0) > 1e-3


@pytest.mark.by_default
@pytest.mark.parametrize("drafts", PROPOSALS)
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_law_under_every_kind_of_draft(verification: Verification, drafts: str) -> None:
    assert p_of(verification, "plain", PROPOSALS[drafts], 5000, seed=10**6) > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafts", PROPOSALS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
def test_the_law_of_all_combinations(verification: Verification, setting: str, drafts: str) -> None:
    assert p_of(verification, setting, PROPOSALS[drafts], 8000, seed=2 * 10**6) > 1e-4  # 147 of them
