"""LengthPolicy: how many drafts to make for a request and to verify in a step; see `controller`, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.speculation_config import SpeculationConfig

_JUDGED_PROPOSALS, _JUDGED_ROUNDS = 32, 8  # a request with fewer is never turned off
_PROBE_EVERY = 50  # steps
_PROBE_AT_LAST = 400  # steps, when probes are held back for their price
_SURPRISING = 0.7  # below this rate, a probe that succeeds is followed up at once
_LONGER_ABOVE, _FIRST_LENGTH = 0.8, 4  # of the threshold rule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with `num_available` drafts on its tape.

    `chances` are how likely each of them is to be committed, never increasing; empty where only their places
    say anything.
    """

    acceptance: Acceptance
    num_available: int
    is_tree: bool = False
    chances: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes beside drafts."""

    num_seqs: int  # decoding
    num_tokens: int  # in all
    num_prefill_tokens: int
    max_draft_tokens: int  # the room for drafts
    draft_s: float = 0.0  # that this step has waited for drafts already


class LengthPolicy(ABC):
    """Decides how many drafts are made and verified, and learns from what was accepted.

    A request whose drafts are hardly ever accepted is turned off and probed one step in 50. Off is a rate
    below `min_acceptance_rate` over at least 32 proposals in 8 or more rounds. The rate counts only drafts
    whose predecessors were accepted: an early miss of a long draft says nothing against a shorter one. While
    `_credit_s` is below 0 probes have cost enough and become rarer; only a policy that knows costs saves up.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._max_length = config.max_draft_tokens
        self._min_rate = config.min_acceptance_rate
        self._credit_s = 0.0
        self._probe_s = 0.0  # saved up for waiting for drafts that are not worth it

    @abstractmethod
    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """How many leading drafts of each candidate to verify; the sum fits the load's room.

        Call it once for each step with decodes, also without candidates: it follows the load.
        """

    @abstractmethod
    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """How many drafts, up to `limit`, are worth having next; 0: do not draft now.

        Call it once for each step of the request, because it counts steps to retry what does not pay.
        `draft_s` is how long the target waits for one draft: a micro-step's seconds over its sequences, 0
        where drafting costs nothing or runs beside the target.
        """

    def gain(self, acceptance: Acceptance, num_drafted: int, num_more: int) -> float:
        """The tokens that so many more drafts, behind those that a request has, are likely to bring."""
        return sum(acceptance.survival(num_drafted + num_more)[num_drafted:])

    def least_chance(self, acceptance: Acceptance) -> float:
        """The chance of coming that a draft must have to be verified, as far as that is known."""
        return 0.0

    def served(
        self, acceptances: Sequence[Acceptance], gains: Sequence[float], seconds: Sequence[float]
    ) -> list[int]:
        """The places, rising, of the requests to run a micro-step for that the target waits for.

        `gains` are the tokens that it would bring each; `seconds` the time that it takes for one, two, ... of
        them. Many requests share the wait, so it may pay for many and not for one. To ask changes nothing:
        once they are asked to be drafted for, `note_served` is told.
        """
        return list(range(len(gains)))

    def note_served(self) -> None:
        """Some were served: the target waits for their micro-step."""
        self._probe_s = 0.0

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """A chain was verified: the acceptance learns from it first, then the policy."""
        acceptance.observe(num_proposed, num_accepted)
        self._judge(acceptance, num_accepted)

    def observe_tree(self, acceptance: Acceptance, num_proposed: int, accepted: Sequence[int]) -> None:
        """A tree was verified; `accepted` are the indices of the accepted path."""
        acceptance.observe_tree(num_proposed, accepted)
        self._judge(acceptance, len(accepted))

    def _judge(self, acceptance: Acceptance, num_accepted: int) -> None:
        """Turn a request off or on after a round that the acceptance has just learnt from."""
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

    def _cap(self, acceptance: Acceptance, count: int) -> int:
        """How many of `count` drafts may be verified."""
        pacing = acceptance.pacing
        return min(count, pacing.probe_length) if pacing.is_off else count

    def _probe(self, acceptance: Acceptance, limit: int) -> int:
        """How many drafts to make, once a step, of a request whose drafts do not pay; mostly 0."""
        pacing = acceptance.pacing
        pacing.num_waited += 1
        least = _PROBE_EVERY if self._credit_s >= 0 else _PROBE_AT_LAST
        pacing.is_probing = pacing.num_waited >= least
        return min(limit, pacing.probe_length) if pacing.is_probing else 0


class FixedPolicy(LengthPolicy):
    """Always the configured length, or what is available of it."""

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """See LengthPolicy."""
        wishes = []
        for c in candidates:
            length = min(c.num_available, self._length(c.acceptance, is_tree=c.is_tree))
            wishes.append(self._cap(c.acceptance, length))
        return fit(wishes, load.max_draft_tokens)

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """See LengthPolicy."""
        if acceptance.pacing.is_off:
            return self._probe(acceptance, limit)
        return min(limit, self._length(acceptance))

    def _length(self, acceptance: Acceptance, *, is_tree: bool = False) -> int:
        return self._max_length


class ThresholdPolicy(FixedPolicy):
    """One draft longer while more than 0.8 of the last ones were accepted, one shorter below the shrink rate.

    It knows no cost and no load. Trees are verified whole: they have no length to choose.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self._shrink_rate = config.draft_shrink_rate

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """See LengthPolicy."""
        super().observe(acceptance, num_proposed, num_accepted)
        length = self._length(acceptance)
        if acceptance.round_rate > _LONGER_ABOVE:
            length += 1
        elif acceptance.round_rate < self._shrink_rate:
            length -= 1
        acceptance.pacing.length = min(self._max_length, max(1, length))

    def _length(self, acceptance: Acceptance, *, is_tree: bool = False) -> int:
        first_length = min(_FIRST_LENGTH, self._max_length)
        return self._max_length if is_tree else acceptance.pacing.length or first_length


def fit(wishes: Sequence[int], room: int) -> list[int]:
    """The wishes cut to sum to at most `room`; none is cut below a larger one's share."""
    if sum(wishes) <= room:
        return list(wishes)
    granted = [0] * len(wishes)
    order = sorted(range(len(wishes)), key=wishes.__getitem__)
    for place, i in enumerate(order):
        granted[i] = min(wishes[i], room // (len(order) - place))
        room -= granted[i]
    return granted
