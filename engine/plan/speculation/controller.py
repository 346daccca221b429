"""LengthPolicy: how many drafts to make for a request, and how many of them a step verifies.

Drafts are worth it while what they bring, in tokens, outruns the time they add. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import SpeculationConfig

_WARM_UP_LENGTH = 4  # drafts of a request in a step while costs are unknown
_JUDGED_PROPOSALS, _JUDGED_ROUNDS = 32, 8  # before these nobody is turned off
_PROBE_EVERY = 50  # steps
_PROBE_AT_LAST = 400  # steps, when probes are held back for their price
_PROBE_SHARE = 0.01  # of the time that probes may take
_SURPRISING = 0.7  # below this rate, a probe that succeeds is followed up at once
_HYSTERESIS = 1.03
_MARGIN = 1.05  # the best of many estimates is an overestimate, so it must be this much better than no drafts
_PATIENCE = 16  # steps without a draft worth verifying, until drafting stops
_RELIEF = 0.8  # of the price at which drafting stopped, to start again
_LEAST_SURVIVAL = 0.03  # of a draft that is made or verified
_PRICED_SLOTS = 4  # drafts that the price of one is an average over, or one for each sequence
_STRETCH_EVERY = 16  # rounds, in one of which a draft more is asked for than seems worth it
_SMOOTHING = 0.2  # of the newest step in the going rate
_LONGER_ABOVE, _FIRST_LENGTH = 0.8, 4  # of the threshold rule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with `num_available` drafts on its tape; `weight` is what a token of it is worth."""

    acceptance: Acceptance
    num_available: int
    weight: float = 1.0
    is_tree: bool = False


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes beside drafts: `num_seqs` decoding sequences, `num_tokens` with their own.

    `max_draft_tokens` is the room for drafts in all; `draft_s` the seconds that this step already waited
    for them.
    """

    num_seqs: int
    num_tokens: int
    num_prefill_tokens: int
    max_draft_tokens: int
    draft_s: float = 0.0


class LengthPolicy(Protocol):
    """Decides lengths. `observe` and `observe_tree` tell it, and the acceptance, what came of them."""

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """How many leading drafts of each to verify: within its available ones, in all within the room.

        Asked once a step that has decodes; without candidates too, to follow the load.
        """
        ...

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """How many drafts, up to `limit`, are worth having next; 0: do not draft now.

        Asked once a step of the request, since it counts them to try again what does not pay. `draft_s` is
        how long the target waits for one draft: a micro-step's seconds over its sequences, 0 where drafting
        costs nothing or runs beside the target.
        """
        ...

    def num_served(self, gains: Sequence[float], seconds: Sequence[float]) -> int:
        """For how many requests, the first ones, to run a micro-step that the target waits for; 0: for none.

        `gains` are the tokens that it would bring each, never increasing, and `seconds` what it takes for
        one, two, ... of them. What is not worth it for one may be for many, since they share it.
        """
        ...

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """A chain was verified."""
        ...

    def observe_tree(self, acceptance: Acceptance, num_proposed: int, accepted: Sequence[int]) -> None:
        """A tree was verified; `accepted` are the indices of the accepted path."""
        ...


def make_length_policy(config: SpeculationConfig, costs: PassCosts) -> LengthPolicy:
    """The policy that the configuration names. `costs` is read, and fed by whoever runs the steps."""
    if config.length_policy == "fixed":
        return FixedPolicy(config)
    if config.length_policy == "threshold":
        return ThresholdPolicy(config)
    return GoodputPolicy(config, costs)


class _Brake:
    """Turns off what is hardly ever accepted, and lets it be tried one step in 50.

    Off is a rate below `min_rate` over at least 32 proposals in at least 8 rounds. The rate is that of
    drafts that could be accepted, because all before them were: a long draft with an early miss is no proof
    against a shorter one. While `credit_s` is below 0 probes have cost enough; who counts no costs leaves it.
    """

    def __init__(self, min_rate: float) -> None:
        self.credit_s = 0.0
        self._min_rate = min_rate

    def cap(self, acceptance: Acceptance, count: int) -> int:
        """How many of `count` drafts may be verified."""
        pacing = acceptance.pacing
        return min(count, pacing.probe_length) if pacing.is_off else count

    def probe(self, acceptance: Acceptance, limit: int) -> int:
        """How many drafts to make of a request for which none is worth it; asked once a step."""
        pacing = acceptance.pacing
        pacing.num_waited += 1
        least = _PROBE_EVERY if self.credit_s >= 0 else _PROBE_AT_LAST
        pacing.is_probing = pacing.num_waited >= least
        return min(limit, pacing.probe_length) if pacing.is_probing else 0

    def observe(self, acceptance: Acceptance, num_accepted: int) -> None:
        """The acceptance has just learnt of a round."""
        pacing, rate = acceptance.pacing, acceptance.rate
        is_judged = acceptance.num_proposed >= _JUDGED_PROPOSALS and acceptance.num_rounds >= _JUDGED_ROUNDS
        pacing.is_off = is_judged and rate < self._min_rate
        if pacing.is_probing and num_accepted and rate < _SURPRISING:
            pacing.probe_length *= 2
            pacing.num_waited = _PROBE_EVERY
        else:
            pacing.probe_length = 1
            pacing.num_waited = 0
        pacing.is_probing = False


class FixedPolicy:
    """Always the configured length, of whatever is there."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._length = config.max_draft_tokens
        self._brake = _Brake(config.min_acceptance_rate)

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """See LengthPolicy."""
        wishes = [
            self._brake.cap(c.acceptance, min(c.num_available, self._length)) for c in candidates
        ]  # fmt: skip
        return _fit(wishes, load.max_draft_tokens)

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """See LengthPolicy."""
        if acceptance.pacing.is_off:
            return self._brake.probe(acceptance, limit)
        return min(limit, self._length)

    def num_served(self, gains: Sequence[float], seconds: Sequence[float]) -> int:
        """See LengthPolicy."""
        return len(gains)

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """See LengthPolicy."""
        acceptance.observe(num_proposed, num_accepted)
        self._brake.observe(acceptance, num_accepted)

    def observe_tree(self, acceptance: Acceptance, num_proposed: int, accepted: Sequence[int]) -> None:
        """See LengthPolicy."""
        acceptance.observe_tree(num_proposed, accepted)
        self._brake.observe(acceptance, len(accepted))


class ThresholdPolicy:
    """One longer while more than 0.8 of the drafts were accepted of late, one shorter below the least rate.

    It knows no cost and no load. Trees are verified whole: their length is no choice.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._max_length = config.max_draft_tokens
        self._min_rate = config.min_acceptance_rate
        self._brake = _Brake(config.min_acceptance_rate)

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """See LengthPolicy."""
        wishes = []
        for c in candidates:
            length = self._max_length if c.is_tree else self._length(c.acceptance)
            wishes.append(self._brake.cap(c.acceptance, min(c.num_available, length)))
        return _fit(wishes, load.max_draft_tokens)

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """See LengthPolicy."""
        if acceptance.pacing.is_off:
            return self._brake.probe(acceptance, limit)
        return min(limit, self._length(acceptance))

    def num_served(self, gains: Sequence[float], seconds: Sequence[float]) -> int:
        """See LengthPolicy."""
        return len(gains)

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """See LengthPolicy."""
        acceptance.observe(num_proposed, num_accepted)
        self._brake.observe(acceptance, num_accepted)
        length = self._length(acceptance)
        if acceptance.round_rate > _LONGER_ABOVE:
            length += 1
        elif acceptance.round_rate < self._min_rate:
            length -= 1
        acceptance.pacing.length = min(self._max_length, max(1, length))

    def observe_tree(self, acceptance: Acceptance, num_proposed: int, accepted: Sequence[int]) -> None:
        """See LengthPolicy."""
        acceptance.observe_tree(num_proposed, accepted)
        self._brake.observe(acceptance, len(accepted))

    def _length(self, acceptance: Acceptance) -> int:
        return acceptance.pacing.length or min(_FIRST_LENGTH, self._max_length)


class GoodputPolicy:
    """The drafts that make for the most expected tokens per second, taken greedily over all requests.

    After TurboSpec (Liu et al. 2024, "Optimizing speculative decoding for serving large language models
    using goodput"). Drafts are ranked by their chance to be committed; since that never increases along a
    draft, the best k of all are leading drafts of each, and only k is to be found.
    """

    def __init__(self, config: SpeculationConfig, costs: PassCosts) -> None:
        self._length = config.max_draft_tokens
        self._brake = _Brake(config.min_acceptance_rate)
        self._costs = costs
        self._is_verifying = True  # the last step with a choice verified drafts
        self._rate = 0.0  # expected tokens per second of late
        self._slot_s = 0.0  # what one more draft adds to a step
        self._probe_s = 0.0  # that may be waited for drafts though they are not worth it

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """See LengthPolicy. Unknown costs verify a few drafts of each."""
        caps = [self._brake.cap(c.acceptance, min(c.num_available, self._length)) for c in candidates]
        num_slots = min(sum(caps), load.max_draft_tokens)
        num_looked_at = max(num_slots, _PRICED_SLOTS, load.num_seqs)
        step_s = self._costs.run(load.num_seqs, load.num_tokens, num_looked_at)
        if step_s is None:
            return _fit([min(cap, _WARM_UP_LENGTH) for cap in caps], load.max_draft_tokens)
        if load.num_prefill_tokens:
            # Drafts are held against a step of decodes alone: beside a long prefill all would look cheap.
            alone_s = self._costs.seconds(load.num_seqs, load.num_seqs) or 0.0
            step_s = step_s + (alone_s - step_s[0])
        elif num_slots and self._costs.needs_plain(load.num_seqs):
            return [0] * len(candidates)
        chosen = self._best(candidates, caps, load, step_s)
        self._note(candidates, caps, chosen)
        num_chosen = sum(chosen)
        self._add_probes(candidates, chosen, load.max_draft_tokens - num_chosen)
        self._brake.credit_s = min(0.0, self._brake.credit_s + _PROBE_SHARE * float(step_s[0]))
        self._probe_s += _PROBE_SHARE * float(step_s[0])
        if sum(chosen) > num_chosen:
            waited_s = 0.0 if num_chosen else load.draft_s
            self._brake.credit_s -= float(step_s[min(sum(chosen), num_slots)] - step_s[num_chosen]) + waited_s
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
            acceptance, weight = candidate.acceptance, candidate.weight
            counts.append(acceptance.reach(_LEAST_SURVIVAL, cap))
            survival = acceptance.survival(counts[-1])
            survivals += survival if weight == 1 else (weight * chance for chance in survival)
        values = np.array(survivals)
        order = np.argsort(-values, kind="stable")[: load.max_draft_tokens]
        tokens = load.num_seqs + np.concatenate(([0.0], np.cumsum(values[order])))
        rates = tokens / (step_s[: len(tokens)] + load.draft_s)
        rates[0] *= _MARGIN if self._is_verifying else _MARGIN * _HYSTERESIS
        best = int(np.argmax(rates))
        if survivals:
            self._is_verifying = best > 0
        self._follow(max(float(rates[best]), load.num_seqs / float(step_s[0])), step_s, load)
        owners = np.repeat(np.arange(len(counts)), counts)
        return [int(count) for count in np.bincount(owners[order[:best]], minlength=len(counts))]

    def _follow(self, rate: float, step_s: NDArray[np.float64], load: StepLoad) -> None:
        """Keep the price of a draft: what a second brings, and the seconds that a draft adds."""
        num_priced = max(_PRICED_SLOTS, load.num_seqs)
        self._rate += (_SMOOTHING if self._rate else 1.0) * (rate - self._rate)
        self._slot_s = float(step_s[num_priced] - step_s[0]) / num_priced

    def _note(self, candidates: Sequence[Candidate], caps: Sequence[int], chosen: Sequence[int]) -> None:
        """Remember who got none, and who got less than there was."""
        for candidate, cap, count in zip(candidates, caps, chosen, strict=True):
            pacing = candidate.acceptance.pacing
            if count:
                pacing.num_refused = 0
                if count < cap or count > (pacing.most_taken or cap):
                    pacing.most_taken = count
            elif cap:
                pacing.num_refused += 1
                pacing.refused_price = self._rate * self._slot_s

    def _add_probes(self, candidates: Sequence[Candidate], chosen: list[int], left: int) -> None:
        """Verify what was drafted as a probe, though it is not worth it by what is known."""
        for i, candidate in enumerate(candidates):
            pacing = candidate.acceptance.pacing
            if pacing.is_probing and chosen[i] == 0:
                chosen[i] = min(left, candidate.num_available, pacing.probe_length)
                left -= chosen[i]

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """See LengthPolicy."""
        pacing = acceptance.pacing
        limit = min(limit, self._length)
        if draft_s and not self._rate:
            limit = min(limit, _WARM_UP_LENGTH)
        price = self._rate * self._slot_s
        is_refused = pacing.num_refused >= _PATIENCE and price > _RELIEF * pacing.refused_price
        count = 0
        if not (pacing.is_off or is_refused):
            least = max(price + self._rate * draft_s, _LEAST_SURVIVAL) if draft_s else _LEAST_SURVIVAL
            count = acceptance.reach(least, limit)
        if count == 0:
            return self._brake.probe(acceptance, limit)
        pacing.is_probing = False
        if draft_s:
            count = min(count, pacing.most_taken or count)
            if acceptance.num_rounds % _STRETCH_EVERY == 0:
                count = min(count + 1, limit)
        return count

    def num_served(self, gains: Sequence[float], seconds: Sequence[float]) -> int:
        """See LengthPolicy. It must bring tokens faster than steps do anyway, or be a probe for all."""
        if not self._rate:
            return len(gains)
        price = self._rate * self._slot_s
        worth = np.cumsum(np.array(gains) - price) - self._rate * np.array(seconds)
        best = int(np.argmax(worth))
        if worth[best] > 0:
            self._probe_s = 0.0
            return best + 1
        if self._probe_s < seconds[-1]:
            return 0
        self._probe_s = 0.0
        return len(gains)

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """See LengthPolicy."""
        acceptance.observe(num_proposed, num_accepted)
        self._brake.observe(acceptance, num_accepted)

    def observe_tree(self, acceptance: Acceptance, num_proposed: int, accepted: Sequence[int]) -> None:
        """See LengthPolicy."""
        acceptance.observe_tree(num_proposed, accepted)
        self._brake.observe(acceptance, len(accepted))


def _fit(wishes: Sequence[int], room: int) -> list[int]:
    """The wishes, cut so that they sum to at most `room` and nobody has less so that another has more."""
    if sum(wishes) <= room:
        return list(wishes)
    granted = [0] * len(wishes)
    order = sorted(range(len(wishes)), key=wishes.__getitem__)
    for place, i in enumerate(order):
        granted[i] = min(wishes[i], room // (len(order) - place))
        room -= granted[i]
    return granted
