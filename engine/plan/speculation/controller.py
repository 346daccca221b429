"""GoodputPolicy: drafts are worth making while the tokens that they bring outrun the time that they add."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.length_policy import (
    Candidate,
    FixedPolicy,
    LengthPolicy,
    StepLoad,
    ThresholdPolicy,
    fit,
)
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig

_WARM_UP_LENGTH = 4  # drafts of a request in a step while costs are unknown
_PROBE_SHARE = 0.01  # of the time that probes may take
_HYSTERESIS = 1.03
_MARGIN = 1.05  # the best of many estimates is an overestimate, so it must be this much better than no drafts
_TOLD_MARGIN = 1.02  # where drafters say which of their drafts are sure: few of many requests have any
_PATIENCE = 16  # steps without a draft worth verifying, until drafting stops
_RELIEF = 0.8  # of the price at which drafting stopped, to start again
_LONGEST_STEP = 3.0  # of one without drafts, that several requests may have to wait for
_LEAST_SURVIVAL = 0.03  # of a draft that is made or verified
_PRICED_SLOTS = 4  # drafts that the price of one is an average over, or one for each sequence
_STRETCH_EVERY = 16  # rounds, in one of which a draft more is asked for than seems worth it
_SMOOTHING = 0.2  # of the newest step in the going rate
_RETRY_EVERY = 50  # refusals of drafts in a row, after which one is verified all the same


def make_length_policy(config: SpeculationConfig, costs: PassCosts) -> LengthPolicy:
    """The policy that the configuration names; it reads `costs`, which the loop feeds."""
    if config.length_policy == "fixed":
        return FixedPolicy(config)
    if config.length_policy == "threshold":
        return ThresholdPolicy(config)
    return GoodputPolicy(config, costs)


class GoodputPolicy(LengthPolicy):
    """The drafts that make for the most expected tokens per second, taken greedily over all requests.

    After TurboSpec (Liu et al. 2024, "Optimizing speculative decoding for serving large language models
    using goodput"). Drafts are ranked by their chance to be committed. It never increases along a draft, so
    the best k drafts of all requests are leading drafts of each, and only k is to be found. Where a drafter
    says how sure it is of each draft, that decides, and not what is usual at its place.
    """

    def __init__(self, config: SpeculationConfig, costs: PassCosts) -> None:
        super().__init__(config)
        self._costs = costs
        self._is_verifying = True  # the last step with a choice verified drafts
        self._rate = 0.0  # expected tokens per second, smoothed
        self._slot_s = 0.0  # seconds that one more draft adds to a step

    @property
    def _price(self) -> float:
        """Tokens that the time of verifying one draft would bring otherwise."""
        return self._rate * self._slot_s

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """See LengthPolicy. While costs are unknown a few drafts of each are verified."""
        if not candidates or not load.max_draft_tokens:  # where there is no room, nothing is refused
            self._follow_load(load)
            return [0] * len(candidates)
        caps = [self._cap(c.acceptance, min(c.num_available, self._max_length)) for c in candidates]
        num_slots = min(sum(caps), load.max_draft_tokens)
        step_s = self._costs.run(load.num_seqs, load.num_tokens, max(num_slots, _num_priced(load)))
        if step_s is None:
            return fit([min(cap, _WARM_UP_LENGTH) for cap in caps], load.max_draft_tokens)
        if load.num_prefill_tokens:
            # Drafts are compared with a step of decodes alone: beside a long prefill all would look cheap.
            alone_s = self._costs.seconds(load.num_seqs, load.num_seqs) or 0.0
            step_s = step_s + (alone_s - step_s[0])
        elif num_slots and self._costs.needs_plain(load.num_seqs):
            return [0] * len(candidates)
        chosen = self._best(candidates, caps, load, step_s)
        self._note_choice(candidates, caps, chosen)
        num_chosen = sum(chosen)
        self._add_probes(candidates, chosen, load.max_draft_tokens - num_chosen)
        self._save_up(float(step_s[0]))
        if sum(chosen) > num_chosen:
            waited_s = 0.0 if num_chosen else load.draft_s
            self._credit_s -= float(step_s[min(sum(chosen), num_slots)] - step_s[num_chosen]) + waited_s
        return chosen

    def _best(
        self,
        candidates: Sequence[Candidate],
        caps: Sequence[int],
        load: StepLoad,
        step_s: NDArray[np.float64],
    ) -> list[int]:
        """The number of drafts of each that brings the most tokens per second."""
        survivals: list[float] = []
        counts = []
        for candidate, cap in zip(candidates, caps, strict=True):
            chances = self._chances(candidate, cap)
            counts.append(len(chances))
            survivals += chances
        values = np.array(survivals)
        order = np.argsort(-values, kind="stable")[: self._room(load, step_s)]
        tokens = load.num_seqs + np.concatenate(([0.0], np.cumsum(values[order])))
        rates = tokens / (step_s[: len(tokens)] + load.draft_s)
        if all(candidate.chances for candidate in candidates):
            rates[0] *= _TOLD_MARGIN
        else:
            rates[0] *= _MARGIN if self._is_verifying else _MARGIN * _HYSTERESIS
        best = int(np.argmax(rates))
        if survivals:
            self._is_verifying = best > 0
        num_priced = _num_priced(load)
        slot_s = float(step_s[num_priced] - step_s[0]) / num_priced
        self._follow(max(float(rates[best]), load.num_seqs / float(step_s[0])), slot_s)
        owners = np.repeat(np.arange(len(counts)), counts)
        return [int(count) for count in np.bincount(owners[order[:best]], minlength=len(counts))]

    def _chances(self, candidate: Candidate, cap: int) -> list[float]:
        """Those of the first drafts that are likely enough to be looked at, never increasing."""
        acceptance, stated = candidate.acceptance, candidate.chances
        if not stated:
            return acceptance.survival(acceptance.reach(_LEAST_SURVIVAL, cap))
        acceptance.note_surplus(sum(max(0.0, chance - self._price) for chance in stated[:cap]))
        if acceptance.is_free and stated[0] < self._min_rate:
            return []
        return [chance for chance in stated[:cap] if chance >= _LEAST_SURVIVAL]

    def _room(self, load: StepLoad, step_s: NDArray[np.float64]) -> int:
        """The most drafts of a step: where several requests share it, one's must be no gap for the others."""
        if load.num_seqs == 1:
            return load.max_draft_tokens
        fitting = int(np.searchsorted(step_s, _LONGEST_STEP * step_s[0], side="right")) - 1
        return min(load.max_draft_tokens, fitting)

    def _follow_load(self, load: StepLoad) -> None:
        """Update the price where there is no draft to choose."""
        costs, num_seqs, num_priced = self._costs, load.num_seqs, _num_priced(load)
        alone_s = costs.seconds(num_seqs, num_seqs)
        step_s = costs.seconds(num_seqs, load.num_tokens)
        wider_s = costs.seconds(num_seqs, load.num_tokens + num_priced)
        if alone_s is None or step_s is None or wider_s is None:
            return
        self._follow(num_seqs / alone_s, (wider_s - step_s) / num_priced)
        self._save_up(alone_s)

    def _follow(self, rate: float, slot_s: float) -> None:
        """Update the two factors of the price."""
        self._rate += (_SMOOTHING if self._rate else 1.0) * (rate - self._rate)
        self._slot_s = slot_s

    def _save_up(self, step_s: float) -> None:
        """A part of each step may be spent on probes."""
        self._credit_s = min(0.0, self._credit_s + _PROBE_SHARE * step_s)
        self._probe_s += _PROBE_SHARE * step_s

    def _note_choice(
        self, candidates: Sequence[Candidate], caps: Sequence[int], chosen: Sequence[int]
    ) -> None:
        """Remember which requests got no drafts, and which got fewer than there were."""
        for candidate, cap, count in zip(candidates, caps, chosen, strict=True):
            pacing = candidate.acceptance.pacing
            if candidate.chances and candidate.acceptance.is_free:
                again = not count and cap > 0 and pacing.num_refused + 1 >= _RETRY_EVERY
                pacing.is_probing = pacing.is_probing or again
                pacing.num_refused = 0 if count or again else pacing.num_refused + 1
            elif count:
                pacing.num_refused = 0
                if count < cap or count > (pacing.most_taken or cap):
                    pacing.most_taken = count
            elif cap:
                pacing.num_refused += 1
                pacing.refused_price = self._price

    def _add_probes(self, candidates: Sequence[Candidate], chosen: list[int], left: int) -> None:
        """Verify what was drafted as a probe, though the estimates are against it."""
        for i, candidate in enumerate(candidates):
            pacing = candidate.acceptance.pacing
            if pacing.is_probing and chosen[i] == 0:
                chosen[i] = min(left, candidate.num_available, pacing.probe_length)
                left -= chosen[i]

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """See LengthPolicy."""
        pacing = acceptance.pacing
        limit = min(limit, self._max_length)
        if draft_s and not self._rate:
            limit = min(limit, _WARM_UP_LENGTH)
        is_refused = pacing.num_refused >= _PATIENCE and self._price > _RELIEF * pacing.refused_price
        count = 0
        if acceptance.is_told and not pacing.is_off and (acceptance.is_free or not is_refused):
            count = limit
        elif not (pacing.is_off or is_refused):
            wait_price = self._price + self._rate * draft_s if draft_s else 0.0
            count = acceptance.reach(max(wait_price, _LEAST_SURVIVAL), limit)
        if count == 0:
            return self._probe(acceptance, limit)
        pacing.is_probing = False
        if draft_s and not acceptance.is_told:
            count = min(count, pacing.most_taken or count)
            if acceptance.num_rounds % _STRETCH_EVERY == 0:
                count = min(count + 1, limit)
        return count

    def gain(self, acceptance: Acceptance, num_drafted: int, num_more: int) -> float:
        """See LengthPolicy. Where the drafter is sure of some drafts only, those are verified."""
        surplus = acceptance.surplus
        if surplus is not None:
            return surplus + self._price
        return super().gain(acceptance, num_drafted, num_more)

    def least_chance(self, acceptance: Acceptance) -> float:
        """See LengthPolicy."""
        return self._price

    def served(
        self, acceptances: Sequence[Acceptance], gains: Sequence[float], seconds: Sequence[float]
    ) -> list[int]:
        """See LengthPolicy. It must bring tokens faster than steps do anyway, or be a probe for all."""
        if not self._rate:
            return super().served(acceptances, gains, seconds)
        order = np.argsort(-np.array(gains), kind="stable")
        worth = np.cumsum(np.array(gains)[order] - self._price) - self._rate * np.array(seconds)
        best = int(np.argmax(worth))
        if worth[best] > 0:
            return sorted(order[: best + 1].tolist())
        return super().served(acceptances, gains, seconds) if self._probe_s >= seconds[-1] else []


def _num_priced(load: StepLoad) -> int:
    return max(_PRICED_SLOTS, load.num_seqs)
