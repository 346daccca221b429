"""Many independent sequences through a real verifier, round by round, and the law that they must follow.

Target and drafter are tables of logits by the last two tokens; everything else is the engine's own code. Only
the reading of the target's law is another: the float64 one of `tests.support.sampling_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.compute.sampling.sampler import Sampler
from engine.compute.verification.verified import Verified
from engine.compute.verification.verifier import Verifier
from engine.plan.step_records import NO_TOKEN, DraftInputs, Int64, LogitAdjustment, SamplingInputs
from tests.support.sampling_reference import CPU, Row, chi_square_p, counted, reference_probs

PROMPT = (0, 1)
Draw = Callable[[torch.Tensor, SamplingInputs, DraftInputs | None], Verified]


@dataclass(frozen=True)
class World:
    """A target and a drafter over a small vocabulary, as logits by (token before last, last token).

    With a grammar, `forbidden` has which tokens may not follow which, and the drafter does not know of it.
    """

    target: torch.Tensor  # [vocab * vocab, vocab]
    drafter: torch.Tensor
    forbidden: NDArray[np.bool_] | None = None  # [vocab, vocab] by (last token, next token)

    @classmethod
    def of(cls, vocab: int, seed: int, scale: float = 1.5, distance: float = 0.8) -> World:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(vocab * vocab, vocab, generator=generator) * scale
        return cls(target, target + torch.randn(vocab * vocab, vocab, generator=generator) * distance)

    @property
    def vocab(self) -> int:
        return self.target.shape[1]

    def contexts(self, tokens: Int64, counts: Int64) -> torch.Tensor:
        """The table row that follows the first `counts[i]` tokens of row i."""
        rows = np.arange(len(tokens))
        return torch.from_numpy(tokens[rows, counts - 2] * self.vocab + tokens[rows, counts - 1])


@dataclass(frozen=True)
class Known:
    """What a proposal may look at: n sequences of `counts` known tokens each, all of them committed."""

    world: World
    row: Row
    tokens: Int64  # [n, longest]
    counts: Int64  # [n]
    seeds: Int64  # [n]


@dataclass(frozen=True)
class Proposal:
    """Drafts for n sequences, the same number of columns for all; only the first `num_drafts` count."""

    token_ids: Int64  # [n, G]
    num_drafts: Int64  # [n]
    parents: tuple[int, ...] | None = None  # [G], the same for all
    probs: list[list[object]] | None = None  # [n][G]


Propose = Callable[[Known], Proposal]


def inputs_for(
    row: Row, seeds: Int64, positions: Int64, adjustments: Iterable[LogitAdjustment] = ()
) -> SamplingInputs:
    """Rows that all have the parameters of `row` but for the adjustments."""
    count = len(seeds)
    return SamplingInputs(
        temperature=np.full(count, row.temperature, np.float32),
        top_k=np.full(count, row.top_k, np.int32),
        top_p=np.full(count, row.top_p, np.float32),
        min_p=np.full(count, row.min_p, np.float32),
        seed=seeds,
        position=positions,
        num_logprobs=np.full(count, row.num_logprobs, np.int32),
        adjustments=tuple(adjustments),
    )


def adjustment_for(world: World, row: Row, index: int, history: Int64) -> LogitAdjustment:
    """The row's own adjustment, with the tokens before it as its history and what the grammar allows then."""
    prompt, output = history[: len(PROMPT)], history[len(PROMPT) :]
    allowed = row.adjustment.allowed_token_ids
    if world.forbidden is not None:
        allowed = tuple(np.flatnonzero(~world.forbidden[history[-1]]).tolist())
    return replace(
        row.adjustment,
        row=index,
        allowed_token_ids=allowed,
        history=counted(prompt.tolist(), output.tolist()),
    )


def is_adjusted(world: World, row: Row) -> bool:
    return world.forbidden is not None or row.adjustment != LogitAdjustment(row=0)


@dataclass(frozen=True)
class Histories:
    """The tokens before every row of logits of a step, drafts included, and the sequences that own them."""

    tokens: Int64  # [R, longest]
    counts: Int64  # [R]
    owner: Int64  # [R]
    base_counts: Int64  # [R] without the drafts

    @classmethod
    def of(cls, known: Known, proposal: Proposal) -> Histories:
        n, width = proposal.token_ids.shape
        tokens = np.repeat(np.pad(known.tokens, ((0, 0), (0, width)))[:, None], width + 1, axis=1)
        counts = np.repeat(known.counts[:, None], width + 1, axis=1)
        parents = proposal.parents or tuple(range(-1, width - 1))
        for draft, parent in enumerate(parents):
            tokens[:, draft + 1] = tokens[:, parent + 1]
            tokens[np.arange(n), draft + 1, counts[:, parent + 1]] = proposal.token_ids[:, draft]
            counts[:, draft + 1] = counts[:, parent + 1] + 1
        real = np.arange(width + 1) <= proposal.num_drafts[:, None]
        owner = np.broadcast_to(np.arange(n)[:, None], real.shape)[real]
        return cls(tokens[real], counts[real], owner, known.counts[owner])

    def lists(self, *, frozen: bool) -> list[Int64]:
        """The histories one by one; `frozen` is the mistake of leaving the drafts out."""
        counts = self.base_counts if frozen else self.counts
        return [tokens[:count] for tokens, count in zip(self.tokens, counts.tolist(), strict=True)]


def draft_inputs(proposal: Proposal) -> DraftInputs | None:
    """The packed drafts; sequences without any have a row of logits only."""
    n, width = proposal.token_ids.shape
    real = np.arange(width) < proposal.num_drafts[:, None]
    if not real.any():
        return None
    some = proposal.num_drafts > 0
    first_row = np.cumsum(proposal.num_drafts + 1) - proposal.num_drafts - 1
    parents = None
    if proposal.parents is not None:
        parents = np.broadcast_to(np.array(proposal.parents, np.int32), real.shape)[real]
    probs: tuple[object, ...] = ()
    if proposal.probs is not None:
        columns = proposal.num_drafts.tolist()
        probs = tuple(
            law for laws, count in zip(proposal.probs, columns, strict=True) for law in laws[:count]
        )
    return DraftInputs(
        sequence=np.arange(n, dtype=np.int32)[some],
        first_row=first_row[some],
        num_drafts=proposal.num_drafts[some].astype(np.int32),
        token_ids=proposal.token_ids[real],
        parents=parents,
        probs=probs,
    )


def generate(
    world: World,
    row: Row,
    verifier: Verifier,
    propose: Propose,
    num_sequences: int,
    num_tokens: int,
    *,
    frozen_penalties: bool = False,
) -> Int64:
    """The first `num_tokens` tokens that each of many sequences commits, [num_sequences, num_tokens].

    Sequence i has seed `row.seed` + i. A row's error is a failure of the test.
    """
    seeds = row.seed + np.arange(num_sequences)
    counts = np.full(num_sequences, len(PROMPT))
    tokens = np.full((num_sequences, len(PROMPT) + num_tokens + 40), 0)
    tokens[:, : len(PROMPT)] = PROMPT
    goal = len(PROMPT) + num_tokens
    while len(live := np.flatnonzero(counts < goal)):
        known = Known(world, row, tokens[live], counts[live], seeds[live])
        proposal = propose(known)
        rows = Histories.of(known, proposal)
        histories = rows.lists(frozen=frozen_penalties) if is_adjusted(world, row) else []
        adjustments = [adjustment_for(world, row, index, each) for index, each in enumerate(histories)]
        logits = world.target[world.contexts(rows.tokens, rows.counts)]
        sampling = inputs_for(row, known.seeds[rows.owner], rows.counts, adjustments)
        result = verifier.draw(logits, sampling, draft_inputs(proposal))
        assert result.rows.row_errors is None
        committed = np.array(result.rows.token_ids)
        real = committed != NO_TOKEN
        place = np.arange(len(committed)) - np.searchsorted(rows.owner, rows.owner)
        owner = live[rows.owner]
        tokens[owner[real], (counts[owner] + place)[real]] = committed[real]
        new = np.bincount(rows.owner[real], minlength=len(live))
        assert new.min() >= 1
        counts[live] += new
    return tokens[:, len(PROMPT) : goal]


def target_law(world: World, row: Row, num_tokens: int) -> NDArray[np.float64]:
    """The joint law of the first tokens of plain decoding, [vocab ** num_tokens]."""
    law = np.ones(1)
    histories = [np.array(PROMPT)]
    for _ in range(num_tokens):
        rows = [world.target[int(h[-2]) * world.vocab + int(h[-1])].double().numpy() for h in histories]
        adjusted = [replace(row, adjustment=adjustment_for(world, row, 0, h)) for h in histories]
        probs = np.array([reference_probs(logits, a) for logits, a in zip(rows, adjusted, strict=True)])
        law = (law[:, None] * probs).ravel()
        histories = [np.append(h, token) for h in histories for token in range(world.vocab)]
    return law


def law_p(tokens: Int64, law: NDArray[np.float64], vocab: int) -> float:
    """The chi-square p-value of sequences [n, num_tokens] against their joint law."""
    cells = tokens @ vocab ** np.arange(tokens.shape[1])[::-1]
    return chi_square_p(cells.tolist(), law)


# How to draft.


def ragged(known: Known, width: int) -> Int64:
    """How many drafts each sequence gets: mostly all, sometimes fewer, of no regard for what they are."""
    mix = (known.seeds * 7919 + known.counts * 104_729) % 8
    return np.where(mix == 0, 0, np.where(mix == 1, width // 2, np.where(mix == 2, width - 1, width)))


def stepwise(width: int, kind: str, *, law_of_q: str = "recorded") -> Propose:
    """Chains of `width` drafts, drafted one by one.

    Kinds: "sampled" from the drafter's law, "greedy", "ngram" (a function of the two tokens before),
    "coupled" (the target's noise), "mixed" (the first three in turn). `law_of_q` may name a mistake: what is
    recorded is "unsharpened", or the draft's "noise used again" in the next round.
    """
    turns = {"sampled": (0,), "greedy": (1,), "ngram": (2,), "coupled": (3,), "mixed": (0, 1, 2)}[kind]

    def propose(known: Known) -> Proposal:
        n, world = len(known.seeds), known.world
        tokens, counts = np.pad(known.tokens, ((0, 0), (0, width))), known.counts
        probs: list[list[object]] = [[] for _ in range(n)]
        plain = replace(known.row, adjustment=LogitAdjustment(row=0))
        for step in range(width):
            contexts = world.contexts(tokens, counts)
            logits = world.drafter[contexts]
            turn = np.array(turns)[(np.arange(n) + step) % len(turns)]
            inputs = inputs_for(plain, known.seeds, counts)
            choices = {1: logits.argmax(dim=1).numpy(), 2: (contexts.numpy() * 5 + 1) % world.vocab}
            laws: list[object] = [None] * n
            if 0 in turns:
                choices[0], table = _drawn(world, logits, inputs, known, law_of_q)
                laws = [law if which == 0 else None for law, which in zip(table, turn, strict=True)]
            if 3 in turns:
                choices[3] = np.array(Sampler(world.vocab, CPU).sample(logits, inputs).token_ids)
            for which in turns:
                chosen = turn == which
                tokens[np.flatnonzero(chosen), counts[chosen]] = choices[which][chosen]
            for sequence, law in enumerate(laws):
                probs[sequence].append(law)
            counts = counts + 1
        drafts = np.stack([tokens[np.arange(n), known.counts + step] for step in range(width)], axis=1)
        return Proposal(drafts, ragged(known, width), probs=probs)

    return propose


def _drawn(
    world: World, logits: torch.Tensor, inputs: SamplingInputs, known: Known, law_of_q: str
) -> tuple[Int64, torch.Tensor]:
    """Drafts from the drafter's law and the law that is recorded for them."""
    sampler = Sampler(world.vocab, CPU)
    rounds = np.zeros_like(known.counts) if law_of_q == "noise used again" else known.counts
    drafts = sampler.sample_with_probs(logits, inputs, rounds)
    if law_of_q == "unsharpened":
        return np.array(drafts.token_ids), drafts.probs.sqrt() / drafts.probs.sqrt().sum(dim=1, keepdim=True)
    return np.array(drafts.token_ids), drafts.probs


TREE = (-1, -1, 0, 0, 1)


def tree(kind: str) -> Propose:
    """Two drafts after the known tokens, two after the first of them, one after the second.

    Kinds: "ranked" (the drafter's likeliest, certain) and "siblings" (sampled, the second without the first).
    """

    def propose(known: Known) -> Proposal:
        n, world = len(known.seeds), known.world
        generator = torch.Generator().manual_seed(int(known.counts.sum()) * 31 + n)
        tokens = np.zeros((n, len(TREE)), np.int64)
        laws: list[list[object]] = [[None] * len(TREE) for _ in range(n)]
        last = known.tokens[np.arange(n), known.counts - 1]
        before = known.tokens[np.arange(n), known.counts - 2]
        for parent, drafts in ((-1, (0, 1)), (0, (2, 3)), (1, (4,))):
            context = before * world.vocab + last if parent < 0 else last * world.vocab + tokens[:, parent]
            law = torch.softmax(world.drafter[torch.from_numpy(context)], dim=1)
            for draft in drafts:
                if kind == "ranked":
                    chosen = law.argmax(dim=1)
                else:
                    chosen = torch.multinomial(law, 1, generator=generator).squeeze(1)
                    for sequence in range(n):
                        laws[sequence][draft] = law[sequence]
                tokens[:, draft] = chosen.numpy()
                law = law.scatter(1, chosen.unsqueeze(1), 0.0)
                law = law / law.sum(dim=1, keepdim=True)
        return Proposal(tokens, ragged(known, len(TREE)), TREE, laws)

    return propose


def nothing(known: Known) -> Proposal:
    """No drafts: plain decoding."""
    return Proposal(np.zeros((len(known.seeds), 1), np.int64), np.zeros(len(known.seeds), np.int64))
