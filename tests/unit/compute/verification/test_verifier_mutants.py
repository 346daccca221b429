"""Negative controls: each known mistake of verification is rejected by the law test that the real one passes.

A mistake and its control differ in one function and have the same number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.sampling.noise import Stream, gumbel_of, noise_bits, row_keys, uniforms
from engine.compute.sampling.sampler import Sampler
from engine.compute.verification import acceptance_probability, rejection_rules
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.rejection_rules import (
    DraftProbabilities,
    Round,
    Rule,
    block_rule,
    token_rule,
)
from engine.compute.verification.verified import Draws, Verified, commit_rows
from engine.compute.verification.verifier import MatchVerifier, RejectionVerifier, Verifier, make_verifier
from engine.plan.step_records import DraftInputs, Int64, SampledRows, SamplingInputs
from tests.support.sampling_reference import CPU, Row, adjusted, inputs_of
from tests.support.verification_law import (
    Known,
    Proposal,
    Propose,
    World,
    generate,
    law_p,
    ragged,
    stepwise,
    target_law,
    tree,
)

VOCAB, NUM_TOKENS, NUM_SEQUENCES = 4, 4, 7_000
WORLD = World.of(VOCAB, seed=2, scale=1.0, distance=2.0)
SAMPLER = Sampler(VOCAB, CPU)
PENALISED = adjusted(Row(), frequency_penalty=1.5, repetition_penalty=1.3)
SAMPLED, CERTAIN = stepwise(2, "sampled"), stepwise(2, "ngram")


def p_of(
    verifier: Verifier,
    propose: Propose,
    world: World = WORLD,
    num_tokens: int = NUM_TOKENS,
    num_sequences: int = NUM_SEQUENCES,
) -> float:
    tokens = generate(world, Row(), verifier, propose, num_sequences, num_tokens)
    return law_p(tokens, target_law(world, Row(), num_tokens), world.vocab)


def one_hot(token_ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(token_ids, VOCAB).double()


def before_drawing(change: Callable[[Round, Int64], None], rule: Rule = token_rule) -> RejectionVerifier:
    """A verifier that changes something once the rule has decided and before the last token is drawn."""

    def changed(this: Round) -> Int64:
        last = rule(this)
        change(this, last)
        return last

    return RejectionVerifier(SAMPLER, changed)


# The controls: what the mutants change is right as it is.


@pytest.mark.by_default
@pytest.mark.parametrize("propose", [SAMPLED, CERTAIN, tree("siblings")], ids=["sampled", "certain", "tree"])
@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_the_verifiers_themselves_pass(rule: Rule, propose: Propose) -> None:
    assert p_of(RejectionVerifier(SAMPLER, rule), propose) > 1e-3


# Residuals.


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_rejects_a_one_hot_residual_for_a_sampled_draft(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    def certain(self: DraftProbabilities, index: Int64, token_ids: Int64) -> torch.Tensor:
        return one_hot(torch.from_numpy(token_ids))

    monkeypatch.setattr(DraftProbabilities, "rows", certain)
    assert p_of(RejectionVerifier(SAMPLER, rule), SAMPLED) < 1e-6


@pytest.mark.by_default
@pytest.mark.parametrize("propose", [SAMPLED, CERTAIN, tree("ranked")], ids=["sampled", "certain", "tree"])
@pytest.mark.parametrize("mistake", ["argmax", "target"])
def test_rejects_another_residual(mistake: str, propose: Propose, monkeypatch: pytest.MonkeyPatch) -> None:
    real = acceptance_probability.residual

    def argmax(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return one_hot(real(p, q, weight).argmax(dim=1))

    def target(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return p

    monkeypatch.setattr(rejection_rules, "residual", {"argmax": argmax, "target": target}[mistake])
    assert p_of(RejectionVerifier(SAMPLER, token_rule), propose) < 1e-6
    assert p_of(RejectionVerifier(SAMPLER, block_rule), propose) < 1e-6


# Acceptance.


@pytest.mark.parametrize("propose", [SAMPLED, CERTAIN], ids=["sampled", "certain"])
def test_rejects_acceptance_by_a_threshold(propose: Propose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_rules, "accept_chance", lambda p, q: (p / q > 0.5).double())
    assert p_of(RejectionVerifier(SAMPLER, token_rule), propose) < 1e-6


def test_rejects_acceptance_of_what_is_likelier_than_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """min(1, p/q) without the division: right for certain drafts only."""
    monkeypatch.setattr(rejection_rules, "accept_chance", lambda p, q: p)
    assert p_of(RejectionVerifier(SAMPLER, token_rule), CERTAIN) > 1e-3
    assert p_of(RejectionVerifier(SAMPLER, token_rule), SAMPLED) < 1e-6


@pytest.mark.by_default
@pytest.mark.parametrize("propose", [SAMPLED, CERTAIN], ids=["sampled", "certain"])
@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_rejects_a_hash_of_the_token_as_chance(rule: Rule, propose: Propose) -> None:
    def hashed(this: Round) -> Int64:
        labels = torch.from_numpy(this.drafts.token_ids)
        keys = torch.tensor([[17, 4]], dtype=torch.int32).expand(len(labels), 2)
        this.uniform = uniforms(keys, labels)
        return rule(this)

    assert p_of(RejectionVerifier(SAMPLER, hashed), propose) < 1e-6


def test_rejects_drafts_that_pass_if_they_are_the_likeliest() -> None:
    """Random drafts, accepted where they equal the argmax of the target, at temperature 1."""

    class Likeliest(MatchVerifier):
        def draw(
            self, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None
        ) -> Verified:
            if drafts is None:
                return super().draw(logits, sampling, drafts)
            rows, draws = DraftRows.of(drafts), Draws.of(SAMPLER.sample(logits, sampling))
            return commit_rows(logits, sampling, rows, draws, rows.follow(logits.argmax(dim=1).numpy()))

    assert p_of(Likeliest(SAMPLER), CERTAIN) < 1e-6


class LaterCounts(DraftRows):
    """Walks on after a draft that was wrong."""

    def follow(self, drawn: Int64) -> Int64:
        column = np.arange(self.token_ids.shape[1])
        before = np.minimum(self.first_row[:, None] + column, len(drawn) - 1)
        agrees = (drawn[before] == self.token_ids) & (column < self.num_drafts[:, None])
        last: Int64 = np.where(agrees, column, -1).max(axis=1)
        return last


def test_rejects_a_later_draft_after_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(this: Round) -> Int64:
        last = token_rule(this)
        agreed = this.uniform.numpy() < 0.5
        column = np.arange(agreed.shape[1])
        real = column < this.drafts.num_drafts[:, None]
        found: Int64 = np.maximum(last, np.where(agreed & real, column, -1).max(axis=1))
        return found

    assert p_of(RejectionVerifier(SAMPLER, later), SAMPLED) < 1e-6

    def commit_later(drafts: DraftInputs, drawn: SampledRows) -> Verified:
        rows, draws = LaterCounts.of(drafts), Draws.of(drawn)
        no_logprobs = inputs_of([Row()] * len(drawn.token_ids))
        return commit_rows(None, no_logprobs, rows, draws, rows.follow(draws.token_ids))

    monkeypatch.setattr("engine.compute.verification.verifier.commit_drafts", commit_later)
    assert p_of(MatchVerifier(SAMPLER), CERTAIN) < 1e-6


def test_rejects_padding_that_counts_as_accepted() -> None:
    """Chains padded with one token to equal lengths, the padding accepted with the last real draft."""

    class Padded(RejectionVerifier):
        def draw(
            self, logits: torch.Tensor, sampling: SamplingInputs, drafts: DraftInputs | None
        ) -> Verified:
            result = super().draw(logits, sampling, drafts)
            if drafts is None or result.paths is None:
                return result
            token_ids = list(result.rows.token_ids)
            whole = (result.paths.num_accepted == drafts.num_drafts) & (drafts.num_drafts < 2)
            for row in (drafts.first_row + drafts.num_drafts)[whole].tolist():
                token_ids[row] = 0
            return replace(result, rows=replace(result.rows, token_ids=token_ids))

    assert p_of(Padded(SAMPLER, token_rule), SAMPLED) < 1e-6


# The bonus token.


@pytest.mark.by_default
@pytest.mark.parametrize("mistake", ["argmax", "first", "drafter's"])
@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_rejects_a_bonus_that_is_not_drawn(rule: Rule, mistake: str) -> None:
    def change(this: Round, last: Int64) -> None:
        whole = last == this.drafts.num_drafts - 1
        rows = torch.from_numpy((this.drafts.first_row + last + 1)[whole])
        if mistake == "argmax":
            this.probs[rows] = one_hot(this.probs[rows].argmax(dim=1))
        elif mistake == "first":
            this.probs[rows] = one_hot(torch.zeros_like(rows))
        else:
            this.probs[rows] = this.probs[rows].sqrt()

    assert p_of(before_drawing(change, rule), SAMPLED) < 1e-6


# Streams of noise.


def gumbel_drafts(stream: Stream) -> Propose:
    """Chains drawn from the drafter's law by the Gumbel-max rule under the position's noise of `stream`."""

    def propose(known: Known) -> Proposal:
        n, world = len(known.seeds), known.world
        tokens, counts = np.pad(known.tokens, ((0, 0), (0, 2))), known.counts
        laws: list[list[object]] = [[] for _ in range(n)]
        for _ in range(2):
            law = torch.softmax(world.drafter[world.contexts(tokens, counts)], dim=1)
            for sequence in range(n):
                laws[sequence].append(law[sequence])
            tokens[np.arange(n), counts] = gumbel_max(law.double(), known.seeds, counts, stream)
            counts = counts + 1
        drafts = np.stack([tokens[np.arange(n), known.counts + step] for step in range(2)], axis=1)
        return Proposal(drafts, ragged(known, 2), probs=laws)

    return propose


def gumbel_max(weights: torch.Tensor, seed: Int64, position: Int64, stream: Stream) -> Int64:
    token_ids = torch.arange(weights.shape[1])
    noise = gumbel_of(noise_bits(row_keys(seed, position, stream), token_ids))
    drawn: Int64 = (weights.log() + noise).argmax(dim=1).numpy()
    return drawn


class GumbelRecovered(RejectionVerifier):
    """Draws recovered and bonus tokens by the Gumbel-max rule."""

    def _last_tokens(self, weights: torch.Tensor, seed: Int64, position: Int64) -> Int64:
        return gumbel_max(weights, seed, position, Stream.RECOVER)


def test_rejects_the_same_gumbel_noise_for_draft_and_residual() -> None:
    # After the first token is refused, that the second was not drafted says that its noise is low.
    laws = ((0.1, 0.6, 0.3), (0.45, 0.45, 0.1))
    target, drafter = (torch.tensor(law).log().expand(9, 3) for law in laws)
    world, verifier = World(target, drafter), GumbelRecovered(Sampler(3, CPU), token_rule)
    assert p_of(verifier, gumbel_drafts(Stream.DRAFT), world) > 1e-3
    assert p_of(verifier, gumbel_drafts(Stream.RECOVER), world) < 1e-6


class PositionKeyed(RejectionVerifier):
    """Keys the numbers that accept by the position of each draft, whatever the round."""

    def _accept_numbers(self, seed: Int64, first: Int64, width: int) -> torch.Tensor:
        zeros = torch.zeros((len(seed), 1), dtype=torch.int64)
        keys = [row_keys(seed, first + draft, Stream.ACCEPT) for draft in range(width)]
        return torch.cat([uniforms(key, zeros) for key in keys], dim=1)


@pytest.mark.slow
def test_block_needs_new_numbers_in_every_round_and_the_token_rule_does_not() -> None:
    assert p_of(make_verifier("block", SAMPLER), SAMPLED, num_sequences=18_000) > 1e-3
    assert p_of(PositionKeyed(SAMPLER, block_rule), SAMPLED, num_sequences=18_000) < 1e-6
    assert p_of(PositionKeyed(SAMPLER, token_rule), SAMPLED, num_sequences=18_000) > 1e-3


def test_block_needs_new_draft_noise_in_every_round_and_the_token_rule_does_not() -> None:
    world, sampler = World.of(2, seed=5, scale=0.5, distance=1.0), Sampler(2, CPU)
    fresh, again = stepwise(4, "sampled"), stepwise(4, "sampled", law_of_q="noise used again")
    assert p_of(make_verifier("block", sampler), fresh, world, 6) > 1e-3
    assert p_of(make_verifier("block", sampler), again, world, 6) < 1e-6
    assert p_of(make_verifier("rejection", sampler), again, world, 6) > 1e-3


# What the verifier is told.


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_rejects_a_recorded_law_that_was_not_sampled_from(rule: Rule) -> None:
    assert p_of(RejectionVerifier(SAMPLER, rule), stepwise(2, "sampled", law_of_q="unsharpened")) < 1e-6


def test_rejects_drafts_that_are_trimmed_by_the_target() -> None:
    """Dropping drafts that the target likes less than the drafter does; harmless under `match`."""

    def trimmed(known: Known) -> Proposal:
        proposal = SAMPLED(known)
        n = np.arange(len(known.seeds))
        contexts = known.world.contexts(known.tokens, known.counts)
        p = torch.softmax(known.world.target[contexts], dim=1).numpy()[n, proposal.token_ids[:, 0]]
        q = torch.softmax(known.world.drafter[contexts], dim=1).numpy()[n, proposal.token_ids[:, 0]]
        return replace(proposal, num_drafts=np.where(p < q, 0, proposal.num_drafts))

    assert p_of(make_verifier("rejection", SAMPLER), trimmed) < 1e-6
    assert p_of(make_verifier("match", SAMPLER), trimmed) > 1e-3


@pytest.mark.by_default("rejection")
@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
def test_rejects_penalties_that_stand_still_along_the_drafts(verification: str) -> None:
    law = target_law(WORLD, PENALISED, NUM_TOKENS)
    verifier = make_verifier(verification, SAMPLER)  # type: ignore[arg-type]
    found = {
        frozen: law_p(
            generate(WORLD, PENALISED, verifier, SAMPLED, 1500, NUM_TOKENS, frozen_penalties=frozen),
            law,
            VOCAB,
        )
        for frozen in (False, True)
    }
    assert found[False] > 1e-3 and found[True] < 1e-6
