"""A made-up target and drafter, to hold length policies against the best length that never changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.plan.speculation.acceptance import Acceptance, MethodPrior
from engine.plan.speculation.length_policy import Candidate, LengthPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.recent_gain import expected_tokens

Cost = Callable[[int, int], float]  # seconds of a step by sequences and tokens


@dataclass(frozen=True)
class Cell:
    """`cost_ratio` is the drafter's micro-step for all sequences over a step of the target without drafts.

    The drafter is waited for. `alpha` is the chance of a draft, by the step.
    """

    alpha: Callable[[int], float]
    cost_ratio: float
    num_seqs: int
    cost: Cost
    max_length: int = 8

    @property
    def draft_s(self) -> float:
        """Seconds of a micro-step for all sequences."""
        return self.cost_ratio * self.cost(self.num_seqs, self.num_seqs)

    def best_rate(self, num_steps: int) -> float:
        """Tokens per second of the best length that never changes, none included."""
        return max(self._rate(length, num_steps) for length in range(self.max_length + 1))

    def _rate(self, length: int, num_steps: int) -> float:
        tokens = sum(expected_tokens(length, self.alpha(step)) for step in range(num_steps)) * self.num_seqs
        step_s = self.cost(self.num_seqs, self.num_seqs * (1 + length)) + length * self.draft_s
        return tokens / (step_s * num_steps)


def run_policy(policy: LengthPolicy, costs: PassCosts, cell: Cell, num_steps: int, seed: int = 0) -> float:
    """Expected tokens per second of what it chose.

    It is told of accepted drafts drawn by chance, and of step times with 5 % of noise, of which one in a
    hundred is ten times as long.
    """
    random, prior = Random(seed), MethodPrior()
    requests = [Acceptance(prior) for _ in range(cell.num_seqs)]
    tokens = seconds = 0.0
    for step in range(num_steps):
        per_draft_s = cell.draft_s / cell.num_seqs
        wanted = [policy.wanted(request, cell.max_length, per_draft_s) for request in requests]
        waited = sum(
            cell.draft_s * (0.5 + 0.5 * sum(w > done for w in wanted) / cell.num_seqs)
            for done in range(max(wanted))
        )
        load = StepLoad(cell.num_seqs, cell.num_seqs, 0, 10_000, waited)
        lengths = policy.lengths([Candidate(r, w) for r, w in zip(requests, wanted, strict=True)], load)
        for request, length in zip(requests, lengths, strict=True):
            accepted = 0
            while accepted < length and random.random() < cell.alpha(step):
                accepted += 1
            if length:
                policy.observe(request, length, accepted)
            tokens += expected_tokens(length, cell.alpha(step))
        num_tokens = cell.num_seqs + sum(lengths)
        step_s = cell.cost(cell.num_seqs, num_tokens)
        seconds += waited + step_s
        told = step_s * (10 if random.random() < 0.01 else random.gauss(1, 0.05))
        costs.observe(cell.num_seqs, num_tokens, told)
    return tokens / seconds
