"""RecentGain: what drafts brought of late, by the clock and by the formula.

The formula assumes that each draft is accepted with the same chance alpha, whatever came before (Leviathan
et al. 2023, "Fast inference from transformers via speculative decoding"). Plain decoding is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.speculation.spec_stats import RecentRatio

_KEEP = 0.98  # of the weight of a round, or of a step, with each after it


def expected_tokens(gamma: float, alpha: float) -> float:
    """Tokens that verifying `gamma` drafts (a mean, perhaps) commits: (1 - alpha^(gamma+1)) / (1 - alpha)."""
    if alpha == 1:
        return gamma + 1.0
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def theoretical_speedup(gamma: float, alpha: float, cost_ratio: float) -> float:
    """These tokens over 1 + gamma c plain steps: a draft takes c of one, verifying as long as one."""
    return expected_tokens(gamma, alpha) / (1 + gamma * cost_ratio)


@dataclass(frozen=True, slots=True)
class FormulaTerms:
    """What Leviathan et al.'s formula is about, as measured of late; all 0 before the first round."""

    alpha: float  # the chance of a draft after accepted ones
    gamma: float  # drafts after one another that a step verifies of a sequence, those without any included
    cost_ratio: float  # seconds that steps waited for one of them, over those of a step without drafts

    @property
    def speedup(self) -> float:
        """Over steps without drafts, if to verify cost nothing; 1 before the first round."""
        return theoretical_speedup(self.gamma, self.alpha, self.cost_ratio)

    def figures(self) -> dict[str, float]:
        """The terms and what comes of them, for a log, by name."""
        figures = {"theoretical_speedup": self.speedup, "alpha": self.alpha}
        figures |= {"gamma": self.gamma, "cost_ratio": self.cost_ratio}
        return {f"draft_{name}": round(value, 4) for name, value in figures.items()}


NO_DRAFTS = FormulaTerms(0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Step:
    """What the step that is being made has come to so far."""

    waited_s: float = 0.0
    num_levels: int = 0
    num_judged: int = 0
    num_accepted: int = 0


class RecentGain:
    """Averages over the last rounds and steps. Loop thread only.

    A step begins with `begin_step`, has rounds, and counts with `observe_step` if it had no prefill. Only
    what it waits for drafts is charged to them: what is drafted beside the target's passes is free.
    """

    def __init__(self) -> None:
        self._lengths = RecentRatio(_KEEP)  # drafts over rounds
        self._pace = RecentRatio(_KEEP)  # seconds that the tokens took without drafts over those they took
        self._accepted = RecentRatio(_KEEP)  # over judged drafts
        self._levels = RecentRatio(_KEEP)  # of drafts over sequences
        self._waited = RecentRatio(_KEEP)  # seconds over those of steps without drafts
        self._step = _Step()

    @property
    def draft_length(self) -> float:
        """Drafts in each of the last rounds, on average; 0 before the first."""
        return self._lengths.ratio

    @property
    def speedup(self) -> float:
        """Of the last steps, over steps without drafts as the costs know them; 1 while they are unknown."""
        return self._pace.ratio or 1.0

    @property
    def terms(self) -> FormulaTerms:
        """What the formula makes of the same steps."""
        gamma = self._levels.ratio
        if not gamma:
            return NO_DRAFTS
        return FormulaTerms(self._accepted.ratio, gamma, self._waited.ratio / gamma)

    @property
    def waited_s(self) -> float:
        """How long the step that is being made has waited for drafts."""
        return self._step.waited_s

    def begin_step(self) -> None:
        """A step is to be prepared."""
        self._step = _Step()

    def note_waited(self, seconds: float) -> None:
        """The step that is being prepared has waited so much longer for drafts."""
        self._step.waited_s += seconds

    def observe_round(self, num_drafts: int, num_levels: int, num_accepted: int, *, is_cut: bool) -> None:
        """A sequence's drafts were verified, `num_levels` of them after one another.

        With `is_cut` it ended with the last accepted one, and no later one was judged.
        """
        self._lengths.observe(num_drafts, 1)
        step = self._step
        step.num_levels += num_levels
        step.num_accepted += num_accepted
        step.num_judged += num_accepted if is_cut else min(num_levels, num_accepted + 1)

    def observe_step(self, num_seqs: int, num_committed: int, seconds: float, plain_s: float | None) -> None:
        """A step, drafting included, gave so many sequences so many tokens.

        `plain_s` is what a step of them without drafts takes; None while unknown.
        """
        if plain_s is None or seconds <= 0:
            return
        step = self._step
        self._pace.observe(num_committed / num_seqs * plain_s, seconds)
        self._levels.observe(step.num_levels, num_seqs)
        self._waited.observe(step.waited_s, plain_s)
        if step.num_judged:
            self._accepted.observe(step.num_accepted, step.num_judged)
