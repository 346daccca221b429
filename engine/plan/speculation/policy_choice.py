"""PolicyChoice: the length policy that holds for each request, its own or the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.length_policy import Candidate, LengthPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import LengthPolicyName, SpeculationConfig

# The one that weighs all requests against each other is asked last: for the room that the others leave.
_IN_TURN: tuple[LengthPolicyName, ...] = ("fixed", "threshold", "goodput")
_WEIGHING: LengthPolicyName = "goodput"


class PolicyChoice(LengthPolicy):
    """Asks for each request the policy that was chosen for it, and else the one that `name` says.

    `given` is the one that the configuration names; the others are made when first chosen.
    """

    def __init__(self, config: SpeculationConfig, given: LengthPolicy, costs: PassCosts) -> None:
        super().__init__(config)
        self.name = config.length_policy
        self._config = config
        self._costs = costs
        self._policies = {config.length_policy: given}
        self._is_mixed = False  # some request has one of its own, or had

    def choose(self, acceptance: Acceptance, name: LengthPolicyName | None) -> None:
        """Use this policy for a request from now on; None is the server's."""
        acceptance.pacing.policy = name
        self._is_mixed = self._is_mixed or name is not None

    def name_for(self, acceptance: Acceptance) -> LengthPolicyName:
        """The policy that holds for a request."""
        return acceptance.pacing.policy or self.name

    def _named(self, name: LengthPolicyName) -> LengthPolicy:
        policy = self._policies.get(name)
        if policy is None:
            config = replace(self._config, length_policy=name)
            policy = self._policies[name] = make_length_policy(config, self._costs)
        return policy

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """See LengthPolicy."""
        if not self._is_mixed:
            return self._named(self.name).lengths(candidates, load)
        lengths = [0] * len(candidates)
        names = [self.name_for(candidate.acceptance) for candidate in candidates]
        for name in _IN_TURN:
            places = [place for place, own in enumerate(names) if own == name]
            if not (places or name == self.name):
                continue
            found = self._named(name).lengths([candidates[place] for place in places], load)
            for place, length in zip(places, found, strict=True):
                lengths[place] = length
            num_tokens, room = load.num_tokens + sum(found), load.max_draft_tokens - sum(found)
            load = replace(load, num_tokens=num_tokens, max_draft_tokens=room)
        return lengths

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        """See LengthPolicy."""
        return self._named(self.name_for(acceptance)).wanted(acceptance, limit, draft_s)

    def gain(self, acceptance: Acceptance, num_drafted: int, num_more: int) -> float:
        """See LengthPolicy."""
        return self._named(self.name_for(acceptance)).gain(acceptance, num_drafted, num_more)

    def least_chance(self, acceptance: Acceptance) -> float:
        """See LengthPolicy."""
        return self._named(self.name_for(acceptance)).least_chance(acceptance)

    def served(
        self, acceptances: Sequence[Acceptance], gains: Sequence[float], seconds: Sequence[float]
    ) -> list[int]:
        """See LengthPolicy. Where the wait is for some anyway, the others pay only for what they add."""
        if not self._is_mixed:
            return self._named(self.name).served(acceptances, gains, seconds)
        weighed = [i for i, each in enumerate(acceptances) if self.name_for(each) == _WEIGHING]
        others = [i for i in range(len(acceptances)) if i not in set(weighed)]
        if not weighed:
            return others
        paid_s = seconds[len(others) - 1] if others else 0.0
        found = self._named(_WEIGHING).served(
            [acceptances[i] for i in weighed],
            [gains[i] for i in weighed],
            [each - paid_s for each in seconds[len(others) :]],
        )
        return sorted([*others, *(weighed[i] for i in found)])

    def note_served(self) -> None:
        """See LengthPolicy."""
        for policy in self._policies.values():
            policy.note_served()

    def observe(self, acceptance: Acceptance, num_proposed: int, num_accepted: int) -> None:
        """See LengthPolicy."""
        self._named(self.name_for(acceptance)).observe(acceptance, num_proposed, num_accepted)

    def observe_tree(self, acceptance: Acceptance, num_proposed: int, accepted: Sequence[int]) -> None:
        """See LengthPolicy."""
        self._named(self.name_for(acceptance)).observe_tree(acceptance, num_proposed, accepted)
