"""The law of each rule by exact enumeration over several rounds: nothing is drawn, |difference| < 1e-12.

The rules are the engine's own. Their numbers are either below or above every chance, and a chance itself is
found by bisection: it is where a decision turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.compute.verification import acceptance_probability, rejection_rules
from engine.compute.verification.draft_rows import DraftRows
from engine.compute.verification.rejection_rules import (
    DraftProbabilities,
    Round,
    Rule,
    block_rule,
    token_rule,
)
from engine.compute.verification.verified import Draws, commit_rows
from engine.plan.step_records import NO_TOKEN, DraftInputs, Int64
from tests.support.sampling_reference import Row, inputs_of

CPU = torch.device("cpu")
VOCAB = 3
TREE = (-1, -1, 0, 0, 1)
Float64 = NDArray[np.float64]
Prefix = tuple[int, ...]
Pattern = tuple[float, ...]
Law = dict[Prefix, float]


class Outcome(NamedTuple):
    """A round that commits `accepted` and then one token with probabilities `after`."""

    chance: float
    accepted: Prefix
    after: Float64


class Plan(NamedTuple):
    """One way that drafting can turn out, with its chance; `laws` are None for certain drafts."""

    chance: float
    token_ids: Prefix
    laws: tuple[Float64 | None, ...]
    parents: tuple[int, ...]

    prefix: Prefix


Drafting = Callable[[Prefix], list[Plan]]
Judge = Callable[[list[Plan]], list[list[Outcome]]]


@cache
def probs_after(prefix: Prefix, seed: int) -> Float64:
    """A random law for the token after any prefix; some tokens are impossible, some laws agree."""
    rng = np.random.default_rng([seed * (len(prefix) % 3 != 2), *prefix[-2:], len(prefix)])
    weights = rng.random(VOCAB) ** 2 * (rng.random(VOCAB) > 0.15) + 1e-9 * (rng.random() > 0.5)
    weights[rng.integers(VOCAB)] += 0.1
    law: Float64 = weights / weights.sum()
    return law


def target(prefix: Prefix) -> Float64:
    return probs_after(prefix, 11)


def drafter(prefix: Prefix) -> Float64:
    return probs_after(prefix, 12)


def sampled(num_drafts: int) -> Drafting:
    def plans(prefix: Prefix) -> list[Plan]:
        found = []
        for token_ids in product(range(VOCAB), repeat=num_drafts):
            laws = tuple(drafter(prefix + token_ids[:i]) for i in range(num_drafts))
            chance = float(np.prod([law[token] for law, token in zip(laws, token_ids, strict=True)]))
            found.append(Plan(chance, token_ids, laws, tuple(range(-1, num_drafts - 1)), prefix))
        return [plan for plan in found if plan.chance > 0]

    return plans


def stopping(prefix: Prefix) -> list[Plan]:
    """Sampled drafts that end early after token 0: how many there are depends on what they are."""
    return sampled_until(prefix, (), 3)


def sampled_until(prefix: Prefix, drafts: Prefix, left: int) -> list[Plan]:
    laws = tuple(drafter(prefix + drafts[:i]) for i in range(len(drafts)))
    if not left or (drafts and drafts[-1] == 0):
        chance = float(np.prod([law[token] for law, token in zip(laws, drafts, strict=True)]))
        parents = tuple(range(-1, len(drafts) - 1))
        return [Plan(chance, drafts, laws, parents, prefix)] if chance > 0 else []
    return [plan for token in range(VOCAB) for plan in sampled_until(prefix, (*drafts, token), left - 1)]


def certain(prefix: Prefix) -> list[Plan]:
    return [Plan(1.0, (sum(prefix) % VOCAB, len(prefix) % VOCAB), (None, None), (-1, 0), prefix)]


def mixed(prefix: Prefix) -> list[Plan]:
    """One certain draft between two sampled ones."""
    found = []
    for first, third in product(range(VOCAB), repeat=2):
        second = (first + len(prefix)) % VOCAB
        laws = drafter(prefix), drafter((*prefix, first, second))
        chance = float(laws[0][first] * laws[1][third])
        found.append(Plan(chance, (first, second, third), (laws[0], None, laws[1]), (-1, 0, 1), prefix))
    return [plan for plan in found if plan.chance > 0]


def ranked_tree(prefix: Prefix) -> list[Plan]:
    first = np.argsort(drafter(prefix))[::-1]
    token_ids = [int(first[0]), int(first[1])]
    token_ids += [int(token) for token in np.argsort(drafter((*prefix, token_ids[0])))[::-1][:2]]
    token_ids += [int(drafter((*prefix, token_ids[1])).argmax())]
    return [Plan(1.0, tuple(token_ids), (None,) * 5, TREE, prefix)]


def siblings(prefix: Prefix) -> list[Plan]:
    """Two tokens sampled without putting the first back, then one sampled after the first of them."""
    found = []
    for one, two, three in product(range(VOCAB), repeat=3):
        law = drafter(prefix)
        rest = np.where(np.arange(VOCAB) == one, 0.0, law)
        rest = rest / rest.sum() if rest.sum() > 0 else np.eye(VOCAB)[(one + 1) % VOCAB]
        below = drafter((*prefix, one))
        chance = float(law[one] * rest[two] * below[three])
        found.append(Plan(chance, (one, two, three), (law, rest, below), (-1, -1, 0), prefix))
    return [plan for plan in found if plan.chance > 0]


def rows_of(plan: Plan) -> list[Float64]:
    """The target's law in each row of logits."""
    rows = [plan.prefix]
    for token, parent in zip(plan.token_ids, plan.parents, strict=True):
        rows.append((*rows[parent + 1], token))
    return [target(row) for row in rows]


def drafts_of(plans: list[Plan]) -> DraftRows:
    counts = np.array([len(plan.token_ids) for plan in plans])
    parents = np.array([parent for plan in plans for parent in plan.parents], np.int32)
    return DraftRows.of(
        DraftInputs(
            sequence=np.arange(len(plans), dtype=np.int32),
            first_row=np.cumsum(counts + 1) - counts - 1,
            num_drafts=counts.astype(np.int32),
            token_ids=np.array([token for plan in plans for token in plan.token_ids]),
            parents=parents,
        )
    )


class LawTable(DraftProbabilities):
    """The same laws, looked up fast: bisection asks for them many times."""

    def __init__(self, laws: list[Float64 | None], token_ids: list[int]) -> None:
        pairs = zip(laws, token_ids, strict=True)
        self._table = np.array([np.eye(VOCAB)[token] if law is None else law for law, token in pairs])

    def of_tokens(self, index: Int64, token_ids: Int64) -> torch.Tensor:
        return torch.from_numpy(self._table[index, token_ids])

    def rows(self, index: Int64, token_ids: Int64) -> torch.Tensor:
        return torch.from_numpy(self._table[index])


class Judgement:
    """A rule on some plans, each as often as there are patterns of numbers for it."""

    def __init__(self, rule: Rule, plans: list[Plan], patterns: list[list[Pattern]]) -> None:
        copies = [plan for plan, some in zip(plans, patterns, strict=True) for _ in some]
        self._rule = rule
        self._probs = torch.tensor(np.array([row for plan in copies for row in rows_of(plan)]))
        self._plain = [law for plan in copies for law in plan.laws]
        token_ids = [token for plan in copies for token in plan.token_ids]
        self._laws: DraftProbabilities = LawTable(self._plain, token_ids)
        self.drafts = drafts_of(copies)
        self.patterns = np.full(self.drafts.token_ids.shape, NEVER)
        for row, pattern in enumerate(pattern for some in patterns for pattern in some):
            self.patterns[row, : len(pattern)] = pattern

    def __call__(self, uniform: Float64) -> tuple[Int64, torch.Tensor]:
        """What the rule says, and the laws that it leaves."""
        probs = self._probs.clone()
        sound = np.ones(len(probs), np.bool_)
        return self._rule(Round(self.drafts, self._laws, probs, sound, torch.tensor(uniform))), probs

    def turning_points(self) -> Float64:
        """For each pattern, the value of its one NaN below which that draft is the last accepted one."""
        copy, draft = np.nonzero(np.isnan(self.patterns))
        low, high = np.zeros(len(self.patterns)), np.ones(len(self.patterns))
        for _ in range(60):
            middle = (low + high) / 2
            uniform = self.patterns.copy()
            uniform[copy, draft] = middle
            accepted = self(uniform)[0] == draft
            low, high = np.where(accepted, middle, low), np.where(accepted, high, middle)
        return np.where(high > 1e-15, high, 0.0)

    def outcomes(self, weights: list[list[float]]) -> list[list[Outcome]]:
        """What every pattern comes to; `weights` are the patterns' chances."""
        laws = [None if law is None else torch.from_numpy(law) for law in self._plain]
        self._laws = DraftProbabilities(laws, VOCAB, CPU)
        last, probs = self(self.patterns)
        paths = self.drafts.paths(last)
        after = probs[torch.from_numpy(self.drafts.first_row + last + 1)].numpy()
        found = iter(zip(self.drafts.token_ids, paths, after, strict=True))
        together = [[(weight, next(found)) for weight in some] for some in weights]
        return [
            [Outcome(weight, tuple(t[path].tolist()), law) for weight, (t, path, law) in some if weight > 0]
            for some in together
        ]


NEVER, ALWAYS = 1.0, 1e-300


def by_token(plans: list[Plan]) -> list[list[Outcome]]:
    """Every draft that is tried is decided by its own number: all patterns of accepting and refusing."""
    counts = [len(plan.token_ids) for plan in plans]
    heads = [[h for n in range(count) for h in product((ALWAYS, NEVER), repeat=n)] for count in counts]
    patterns: list[list[Pattern]] = [[(*head, np.nan) for head in some] for some in heads]
    turns = iter(Judgement(token_rule, plans, patterns).turning_points().tolist())
    chances = [{head: next(turns) for head in some} for some in heads]
    whole: list[list[Pattern]] = [list(product((ALWAYS, NEVER), repeat=count)) for count in counts]
    weights = [[weight_of(p, some) for p in w] for w, some in zip(whole, chances, strict=True)]
    return Judgement(token_rule, plans, whole).outcomes(weights)


def weight_of(pattern: Pattern, chances: dict[Pattern, float]) -> float:
    weight = 1.0
    for draft, number in enumerate(pattern):
        chance = chances[pattern[:draft]]
        weight *= chance if number == ALWAYS else 1 - chance
    return weight


def by_block(plans: list[Plan]) -> list[list[Outcome]]:
    """The last draft whose own number accepts its prefix."""
    counts = [len(plan.token_ids) for plan in plans]
    alone: list[list[Pattern]] = [[(*[NEVER] * i, np.nan) for i in range(count)] for count in counts]
    turns = iter(Judgement(block_rule, plans, alone).turning_points().tolist())
    weights = []
    for count in counts:
        chances = np.array([next(turns) for _ in range(count)])
        accepted = [float(chances[i] * np.prod(1 - chances[i + 1 :])) for i in range(count)]
        weights.append([float(np.prod(1 - chances)), *accepted])
    whole: list[list[Pattern]] = [[(), *[(*[NEVER] * i, ALWAYS) for i in range(count)]] for count in counts]
    return Judgement(block_rule, plans, whole).outcomes(weights)


def by_match(plans: list[Plan]) -> list[list[Outcome]]:
    """Every way that all rows can be drawn, walked and put in order by the engine's own code."""
    return [matched(plan) for plan in plans]


def matched(plan: Plan) -> list[Outcome]:
    laws = np.array(rows_of(plan))
    drawn = np.array(list(product(range(VOCAB), repeat=len(laws))))
    weights = np.prod(laws[np.arange(len(laws)), drawn], axis=1)
    drafts = drafts_of([plan] * len(drawn))
    draws = Draws(drawn.ravel(), {})
    sampling = inputs_of([Row()] * drawn.size)
    result = commit_rows(
        torch.zeros(drawn.size, VOCAB), sampling, drafts, draws, drafts.follow(drawn.ravel())
    )
    found = []
    for weight, tokens in zip(weights, np.reshape(result.rows.token_ids, drawn.shape).tolist(), strict=True):
        committed = tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens
        found.append(Outcome(float(weight), tuple(committed[:-1]), np.eye(VOCAB)[committed[-1]]))
    return found


def law_of(drafting: Drafting, judge: Judge, num_tokens: int) -> Law:
    """The joint law of the first tokens that are committed, over as many rounds as it takes."""
    prefixes = [p for size in range(num_tokens) for p in product(range(VOCAB), repeat=size)]
    plans = [plan for prefix in prefixes for plan in drafting(prefix)]
    rounds: dict[Prefix, list[tuple[float, Outcome]]] = {prefix: [] for prefix in prefixes}
    for plan, found in zip(plans, judge(plans), strict=True):
        rounds[plan.prefix] += [(plan.chance * outcome.chance, outcome) for outcome in found]
    law: Law = {(): 1.0}
    for prefix in prefixes:  # shorter ones first: their chance is complete when they are reached
        chance = law.pop(prefix, 0.0)
        for weight, outcome in rounds[prefix]:
            for token in np.flatnonzero(outcome.after).tolist():
                key = (*prefix, *outcome.accepted, token)[:num_tokens]
                law[key] = law.get(key, 0.0) + chance * weight * float(outcome.after[token])
    return law


def distance(law: Law, num_tokens: int) -> float:
    """The greatest difference from drawing token by token."""
    found = 0.0
    for tokens in product(range(VOCAB), repeat=num_tokens):
        truth = np.prod([target(tokens[:i])[tokens[i]] for i in range(num_tokens)])
        found = max(found, abs(law.get(tokens, 0.0) - float(truth)))
    return found


CHAINS = {"one": sampled(1), "two": sampled(2), "three": sampled(3), "certain": certain, "mixed": mixed}
TREES = {"ranked": ranked_tree, "siblings": siblings}


@pytest.mark.parametrize("drafting", [*CHAINS, "stopping", *TREES])
def test_the_token_rule_has_the_law_of_plain_decoding(drafting: str) -> None:
    plans = {**CHAINS, **TREES, "stopping": stopping}[drafting]
    assert distance(law_of(plans, by_token, 4), 4) < 1e-12


@pytest.mark.parametrize("drafting", [*CHAINS, "stopping"])
def test_the_block_rule_has_the_law_of_plain_decoding(drafting: str) -> None:
    plans = {**CHAINS, "stopping": stopping}[drafting]
    assert distance(law_of(plans, by_block, 4), 4) < 1e-12


@pytest.mark.by_default("two", "certain")
@pytest.mark.parametrize("drafting", ["two", "certain", *TREES])
def test_matching_has_the_law_of_plain_decoding(drafting: str) -> None:
    plans = {**CHAINS, **TREES}[drafting]
    assert distance(law_of(plans, by_match, 4), 4) < 1e-12


def mean_accepted(judge: Judge, drafting: Drafting) -> float:
    plans = drafting(())
    return sum(
        plan.chance * outcome.chance * len(outcome.accepted)
        for plan, found in zip(plans, judge(plans), strict=True)
        for outcome in found
    )


def test_block_accepts_more_than_the_token_rule() -> None:
    assert mean_accepted(by_block, sampled(3)) > mean_accepted(by_token, sampled(3)) + 1e-3


def test_the_token_rule_accepts_one_draft_as_often_as_any_rule_could() -> None:
    best = np.minimum(target(()), drafter(())).sum()
    assert mean_accepted(by_token, sampled(1)) == pytest.approx(best, abs=1e-12)


# Negative controls.


MISTAKES = [(judge, mistake) for judge in (by_token, by_block) for mistake in ("argmax", "target", "one-hot")]


@pytest.mark.parametrize(("judge", "mistake"), [*MISTAKES, (by_block, "no weight")])
def test_rejects_another_residual(judge: Judge, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = acceptance_probability.residual

    def residual(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        if mistake == "argmax":
            return torch.nn.functional.one_hot(real(p, q, weight).argmax(dim=1), VOCAB).double()
        return p if mistake == "target" else real(p, q)

    def one_hot(self: DraftProbabilities, index: Int64, token_ids: Int64) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.from_numpy(token_ids), VOCAB).double()

    if mistake == "one-hot":
        monkeypatch.setattr(DraftProbabilities, "rows", one_hot)
        monkeypatch.setattr(LawTable, "rows", one_hot)
    else:
        monkeypatch.setattr(rejection_rules, "residual", residual)
    assert distance(law_of(sampled(2), judge, 4), 4) > 1e-4


def test_rejects_siblings_that_do_not_answer_to_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_rules, "residual", lambda p, q, weight=None: p)
    assert distance(law_of(ranked_tree, by_token, 4), 4) > 1e-4


def test_rejects_a_block_that_forgets_the_rest_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chance of a prefix without the next token's laws: its weight alone."""
    monkeypatch.setattr(rejection_rules, "block_chance", lambda weight, p, q: weight)
    assert distance(law_of(sampled(2), by_block, 4), 4) > 1e-4
