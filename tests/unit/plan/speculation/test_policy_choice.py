"""The policy of each request: its own where it has one, and the room and the time of a step are shared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.plan.speculation.acceptance import Acceptance, MethodPrior
from engine.plan.speculation.length_policy import Candidate, LengthPolicy, StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.policy_choice import PolicyChoice
from engine.plan.speculation.speculation_config import LengthPolicyName, SpeculationConfig

NAMES: tuple[LengthPolicyName, ...] = ("fixed", "threshold", "goodput")


class Weighing(LengthPolicy):
    """Stands for goodput: verifies one draft of each, and runs a micro-step for the first alone."""

    def __init__(self, config: SpeculationConfig) -> None:
        super().__init__(config)
        self.loads: list[StepLoad] = []
        self.seconds: list[list[float]] = []

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        self.loads.append(load)
        return [min(1, load.max_draft_tokens)] * len(candidates)

    def wanted(self, acceptance: Acceptance, limit: int, draft_s: float = 0.0) -> int:
        return min(1, limit)

    def served(
        self, acceptances: Sequence[Acceptance], gains: Sequence[float], seconds: Sequence[float]
    ) -> list[int]:
        self.seconds.append(list(seconds))
        return [0]


def make(server: LengthPolicyName = "goodput") -> tuple[PolicyChoice, Weighing]:
    config = SpeculationConfig(1000, 8, length_policy=server, min_acceptance_rate=0.0)
    given = Weighing(config)
    return PolicyChoice(config, given, PassCosts()), given


def acceptance_of(choice: PolicyChoice, name: LengthPolicyName | None) -> Acceptance:
    acceptance = Acceptance(MethodPrior())
    choice.choose(acceptance, name)
    return acceptance


def test_without_a_choice_the_server_s_decides_alone() -> None:
    choice, given = make()
    acceptances = [acceptance_of(choice, None) for _ in range(3)]
    load = StepLoad(3, 3, 0, 100)
    assert choice.lengths([Candidate(each, 6) for each in acceptances], load) == [1, 1, 1]
    assert given.loads == [load]
    assert choice.wanted(acceptances[0], 8) == 1
    assert choice.served(acceptances, [1.0, 2.0, 3.0], [0.1, 0.2, 0.3]) == [0]
    assert given.seconds == [[0.1, 0.2, 0.3]]


def test_each_request_has_its_own() -> None:
    choice, _ = make()
    own = {name: acceptance_of(choice, name) for name in NAMES}
    assert [choice.name_for(own[name]) for name in NAMES] == list(NAMES)
    assert [choice.wanted(own[name], 8) for name in NAMES] == [8, 4, 1]
    candidates = [Candidate(own[name], 8) for name in reversed(NAMES)]
    assert choice.lengths(candidates, StepLoad(3, 3, 0, 100)) == [1, 4, 8]


def test_who_weighs_gets_the_room_that_the_others_leave_and_follows_every_step() -> None:
    choice, given = make()
    fixed, weighed = acceptance_of(choice, "fixed"), acceptance_of(choice, None)
    candidates = [Candidate(weighed, 8), Candidate(fixed, 8)]
    assert choice.lengths(candidates, StepLoad(2, 2, 0, 8)) == [0, 8]
    assert choice.lengths(candidates[1:], StepLoad(2, 2, 0, 20)) == [8]
    assert [(load.num_tokens, load.max_draft_tokens) for load in given.loads] == [(10, 0), (10, 12)]


def test_who_does_not_weigh_is_waited_for_and_the_others_pay_what_they_add() -> None:
    choice, given = make()
    fixed, weighed = acceptance_of(choice, "fixed"), acceptance_of(choice, None)
    other = acceptance_of(choice, None)
    assert choice.served([weighed, fixed, other], [0.1, 0.0, 0.2], [0.5, 0.6, 0.8]) == [0, 1]
    assert given.seconds == [[pytest.approx(0.1), pytest.approx(0.3)]]
    assert choice.served([fixed], [0.0], [0.5]) == [0]


def test_the_server_s_may_change_and_requests_with_their_own_keep_it() -> None:
    choice, _ = make()
    free, own = acceptance_of(choice, None), acceptance_of(choice, "threshold")
    choice.name = "fixed"
    assert (choice.wanted(free, 8), choice.wanted(own, 8)) == (8, 4)
    choice.choose(own, None)
    assert choice.wanted(own, 8) == 8


@pytest.mark.parametrize("name", NAMES)
def test_what_was_accepted_is_learnt_under_any(name: LengthPolicyName) -> None:
    choice, _ = make()
    acceptance = acceptance_of(choice, name)
    choice.observe(acceptance, 4, 4)
    choice.observe_tree(acceptance, 4, [0])
    assert (acceptance.num_rounds, acceptance.num_proposed) == (2, 8)
    assert acceptance.pacing.length == (5 if name == "threshold" else 0)
