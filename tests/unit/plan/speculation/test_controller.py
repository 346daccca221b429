from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from engine.plan.speculation.acceptance import Acceptance, MethodPrior
from engine.plan.speculation.controller import GoodputPolicy, make_length_policy
from engine.plan.speculation.length_policy import (
    Candidate,
    FixedPolicy,
    LengthPolicy,
    StepLoad,
    ThresholdPolicy,
)
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import LengthPolicyName, SpeculationConfig
from tests.support.speculation_load import Cell, run_policy

ALL: tuple[LengthPolicyName, ...] = ("fixed", "threshold", "goodput")


def make_policy(
    name: LengthPolicyName,
    *,
    costs: PassCosts | None = None,
    max_drafts: int = 8,
    min_rate: float = 0.3,
    shrink_rate: float = 0.5,
) -> LengthPolicy:
    config = SpeculationConfig(
        *(1000, max_drafts),
        length_policy=name,
        min_acceptance_rate=min_rate,
        draft_shrink_rate=shrink_rate,
    )
    return make_length_policy(config, costs or PassCosts())


def make_costs(fixed_s: float, token_s: float, num_seqs: int = 1) -> PassCosts:
    """A machine that is known already."""
    costs = PassCosts()
    sizes = [num_seqs + more for more in (*range(9), 10, 12, 14, 16, 20, 24, 32, 64, 128, 256)]
    costs.seed([(num_seqs, size, fixed_s + token_s * size) for size in sizes])
    return costs


def load_of(num_seqs: int, room: int = 1000) -> StepLoad:
    return StepLoad(num_seqs, num_seqs, 0, room)


def learnt(rate: float, max_drafts: int = 8, prior: MethodPrior | None = None) -> Acceptance:
    """A request each of whose drafts was accepted with this chance."""
    acceptance, random = Acceptance(prior or MethodPrior()), Random(2)
    for _ in range(300):
        accepted = 0
        while accepted < max_drafts and random.random() < rate:
            accepted += 1
        acceptance.observe(max_drafts, accepted)
    return acceptance


def test_the_configuration_names_the_policy() -> None:
    assert isinstance(make_policy("fixed"), FixedPolicy)
    assert isinstance(make_policy("threshold"), ThresholdPolicy)
    assert isinstance(make_policy("goodput"), GoodputPolicy)


# The rule that turns off.


@pytest.mark.parametrize("name", ALL)
def test_hardly_ever_accepted_is_off_after_32_proposals_and_tried_one_step_in_50(
    name: LengthPolicyName,
) -> None:
    policy, acceptance = make_policy(name), Acceptance(MethodPrior())
    for _ in range(7):
        assert policy.wanted(acceptance, 4) > 0
        policy.observe(acceptance, 4, 0)
    assert policy.wanted(acceptance, 4) > 0
    policy.observe(acceptance, 4, 0)
    for _ in range(2):
        assert [policy.wanted(acceptance, 4) for _ in range(50)] == [0] * 49 + [1]
        assert policy.lengths([Candidate(acceptance, 4)], load_of(1)) == [1]
        policy.observe(acceptance, 1, 0)


@pytest.mark.parametrize("name", ALL)
def test_least_rate_0_never_turns_off(name: LengthPolicyName) -> None:
    policy, acceptance = make_policy(name, min_rate=0.0), Acceptance(MethodPrior())
    for _ in range(200):
        policy.observe(acceptance, 4, 0)
    assert not acceptance.pacing.is_off
    if name != "goodput":  # which knows better
        assert policy.wanted(acceptance, 4) > 0


@pytest.mark.parametrize("name", ALL)
def test_what_comes_to_be_accepted_again_is_soon_on(name: LengthPolicyName) -> None:
    policy, acceptance = make_policy(name), Acceptance(MethodPrior())
    for _ in range(30):
        policy.observe(acceptance, 4, 0)
    asked, lengths = 0, []
    while acceptance.pacing.is_off:
        asked += 1
        assert asked < 70
        wanted = policy.wanted(acceptance, 8)
        if wanted:
            lengths.append(wanted)
            policy.observe(acceptance, wanted, wanted)
    assert lengths[:3] == [1, 2, 4]  # a success is followed up at once


def test_a_long_draft_with_an_early_miss_is_not_held_against_short_ones() -> None:
    policy, acceptance = make_policy("fixed", max_drafts=32), Acceptance(MethodPrior())
    for _ in range(40):
        policy.observe(acceptance, 32, 1)  # 3 % of all, half of those that could be
    assert not acceptance.pacing.is_off
    assert policy.wanted(acceptance, 32) == 32


# Fixed and threshold.


def test_fixed_is_what_is_there_up_to_the_length_and_shares_the_room() -> None:
    policy = make_policy("fixed", max_drafts=4)
    candidates = [Candidate(Acceptance(MethodPrior()), n) for n in (6, 1, 3)]
    assert policy.lengths(candidates, load_of(3)) == [4, 1, 3]
    assert policy.lengths(candidates, load_of(3, room=6)) == [3, 1, 2]
    assert policy.lengths(candidates, load_of(3, room=0)) == [0, 0, 0]
    assert policy.wanted(candidates[0].acceptance, 2) == 2


def test_threshold_grows_while_nearly_all_is_accepted_and_shrinks_below_its_lower_mark() -> None:
    policy, acceptance = make_policy("threshold", max_drafts=6), Acceptance(MethodPrior())
    lengths = []
    for _ in range(4):
        lengths.append(policy.wanted(acceptance, 8))
        policy.observe(acceptance, lengths[-1], lengths[-1])
    assert lengths == [4, 5, 6, 6]
    for _ in range(30):
        policy.observe(acceptance, policy.wanted(acceptance, 8) or 1, 0)
    assert acceptance.pacing.length == 1
    steady = Acceptance(MethodPrior())
    for _ in range(20):
        policy.observe(steady, 4, 2)
    assert policy.wanted(steady, 8) == 4


def test_when_drafts_shrink_and_when_they_end_are_two_marks() -> None:
    """Two of five drafts are accepted, two thirds of those that count for turning off."""
    lengths, are_off = [], []
    for min_rate, shrink_rate in ((0.3, 0.5), (0.3, 0.4), (0.9, 0.4), (0.0, 0.5), (0.9, 0.0)):
        policy = make_policy("threshold", min_rate=min_rate, shrink_rate=shrink_rate)
        acceptance = Acceptance(MethodPrior())
        for _ in range(8):
            policy.observe(acceptance, 5, 2)
        lengths.append(acceptance.pacing.length)
        are_off.append(acceptance.pacing.is_off)
    assert lengths == [1, 4, 4, 1, 4]
    assert are_off == [False, False, True, False, True]


def test_threshold_verifies_trees_whole() -> None:
    policy, acceptance = make_policy("threshold", max_drafts=16), Acceptance(MethodPrior())
    policy.observe_tree(acceptance, 12, [0])
    assert policy.lengths([Candidate(acceptance, 12, is_tree=True)], load_of(1)) == [12]
    fixed = make_policy("fixed", max_drafts=16)
    fixed.observe_tree(acceptance, 12, [])
    assert fixed.lengths([Candidate(acceptance, 12, is_tree=True)], load_of(1)) == [12]


# Goodput.


def test_unknown_costs_verify_a_few() -> None:
    policy = make_policy("goodput", max_drafts=32)
    candidates = [Candidate(Acceptance(MethodPrior()), n) for n in (20, 2)]
    assert policy.lengths(candidates, load_of(2)) == [4, 2]
    assert policy.lengths(candidates, load_of(2, room=3)) == [2, 1]


def test_the_first_steps_measure_two_without_drafts() -> None:
    costs = PassCosts()
    policy = make_policy("goodput", costs=costs)
    candidates = [Candidate(Acceptance(MethodPrior()), 4)]
    costs.observe(1, 5, 0.02)
    for _ in range(2):
        assert policy.lengths(candidates, load_of(1)) == [0]
        costs.observe(1, 1, 0.02)
    assert policy.lengths(candidates, load_of(1)) == [4]


def best_length(rate: float, fixed_s: float, token_s: float, most: int) -> int:
    def goodput(length: int) -> float:
        return sum(rate**i for i in range(length + 1)) / (fixed_s + token_s * (1 + length))

    return max(range(most + 1), key=goodput)


@pytest.mark.parametrize(("rate", "token_s"), [(0.9, 0.002), (0.8, 0.004), (0.5, 0.002), (0.6, 0.02)])
def test_one_request_gets_the_length_of_most_goodput(rate: float, token_s: float) -> None:
    policy = make_policy("goodput", costs=make_costs(0.02, token_s))
    acceptance = learnt(rate)
    chosen = policy.lengths([Candidate(acceptance, 8)], load_of(1))[0]
    assert abs(chosen - best_length(rate, 0.02, token_s, 8)) <= 1


def test_the_likelier_drafts_are_taken_first() -> None:
    prior = MethodPrior()
    good, poor = learnt(0.95, prior=prior), learnt(0.4, prior=prior)
    policy = make_policy("goodput", costs=make_costs(0.004, 0.002, num_seqs=2))
    chosen = policy.lengths([Candidate(poor, 8), Candidate(good, 8)], load_of(2))
    assert chosen[1] >= 4 > chosen[0]
    tight = policy.lengths([Candidate(poor, 8), Candidate(good, 8)], load_of(2, room=3))
    assert tight == [0, 3]


def test_beside_a_prefill_drafts_are_held_against_decodes_alone() -> None:
    costs = make_costs(0.002, 0.001, num_seqs=4)
    candidates = [Candidate(learnt(0.3), 8) for _ in range(4)]
    alone = make_policy("goodput", costs=costs).lengths(candidates, load_of(4))
    beside = make_policy("goodput", costs=costs).lengths(candidates, StepLoad(4, 200, 196, 1000))
    assert sum(beside) <= sum(alone) + 4


def test_a_long_draft_is_cut_where_others_wait_for_the_step() -> None:
    sure = learnt(1.0, 40)
    alone = make_policy("goodput", costs=make_costs(0.01, 0.001), max_drafts=40)
    assert alone.lengths([Candidate(sure, 40)], load_of(1)) == [40], "it is its own gap"
    crowd = make_policy("goodput", costs=make_costs(0.01, 0.001, 2), max_drafts=40)
    assert crowd.lengths([Candidate(sure, 40)], load_of(2)) == [24], "a step of 12 ms may come to 36"


@pytest.mark.parametrize("is_told", [False, True], ids=["by places", "told"])
def test_drafts_that_prompts_leave_no_room_are_not_found_too_dear(is_told: bool) -> None:
    policy = make_policy("goodput", costs=make_costs(0.02, 0.0001))
    acceptance = learnt(0.9)
    chances: list[float] = []
    if is_told:
        chances = acceptance.expect(("heads", False), [0.9**place for place in range(1, 9)])
    candidate = Candidate(acceptance, 8, chances=chances)
    assert policy.wanted(acceptance, 8) == 8
    before = policy.lengths([candidate], load_of(1))
    for _ in range(30):
        assert policy.lengths([candidate], StepLoad(1, 500, 499, max_draft_tokens=0)) == [0]
        assert policy.wanted(acceptance, 8) == 8
    assert policy.lengths([candidate], load_of(1)) == before


def test_what_never_pays_is_drafted_no_more_until_the_load_falls() -> None:
    costs = make_costs(0.0005, 0.001, num_seqs=8)
    costs.seed([(1, n, 0.002 + 0.0001 * n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)])
    policy = make_policy("goodput", costs=costs)
    acceptance = learnt(0.8)
    for _ in range(16):
        assert policy.wanted(acceptance, 8) > 0
        assert policy.lengths([Candidate(acceptance, 8)], load_of(8)) == [0]
    assert [policy.wanted(acceptance, 8) for _ in range(49)] == [0] * 49
    assert policy.wanted(acceptance, 8) == 1
    assert policy.lengths([Candidate(acceptance, 8)], load_of(8)) == [1]
    policy.observe(acceptance, 1, 1)
    assert policy.wanted(acceptance, 8) == 0
    policy.lengths([], load_of(1))
    assert policy.wanted(acceptance, 8) == 8
    assert policy.lengths([Candidate(acceptance, 8)], load_of(1)) == [8]


def test_probes_that_cost_much_are_held_back() -> None:
    costs = make_costs(0.0001, 0.01, num_seqs=1)
    policy = make_policy("goodput", costs=costs)
    acceptance, probes = learnt(0.8), []
    for step in range(1000):
        wanted = policy.wanted(acceptance, 8)
        chosen = policy.lengths([Candidate(acceptance, wanted)] if wanted else [], load_of(1))
        if chosen and chosen[0]:
            probes.append(step)
            policy.observe(acceptance, chosen[0], 1)
    assert 5 <= len(probes) <= 12  # each costs a step: one in a hundred


def test_hysteresis_asks_for_three_percent_more_to_start() -> None:
    # One draft brings 7 % more tokens than it takes time.
    def costs(two_s: float = 1.40) -> PassCosts:
        known = PassCosts()
        known.seed([(1, 1, 1.0), (1, 2, two_s), (1, 3, 3.0), (1, 4, 4.5)])
        return known

    acceptance = Acceptance(MethodPrior())
    for _ in range(400):
        acceptance.observe(1, 1)
        acceptance.observe(1, 0)
    value = acceptance.survival(1)[0]
    assert 1.055 < (1 + value) / 1.40 < 1.08
    running = make_policy("goodput", costs=costs())
    assert running.lengths([Candidate(acceptance, 1)], load_of(1)) == [1]
    stopped = make_policy("goodput", costs=costs())
    assert stopped.lengths([Candidate(learnt(0.05), 1)], load_of(1)) == [0]
    assert stopped.lengths([Candidate(acceptance, 1)], load_of(1)) == [0]
    hardly = make_policy("goodput", costs=costs(1.45))
    assert hardly.lengths([Candidate(acceptance, 1)], load_of(1)) == [0], "less than 5 % is within the noise"


def test_drafts_that_are_waited_for_must_pay_for_that() -> None:
    policy = make_policy("goodput", costs=make_costs(0.02, 0.0001))
    acceptance = learnt(0.8)
    policy.lengths([Candidate(acceptance, 8)], load_of(1))
    lengths = [policy.wanted(acceptance, 8, draft_s) for draft_s in (0.0, 0.001, 0.005, 0.05)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8 and lengths[-1] == 0


def test_a_wait_that_is_not_worth_it_is_a_probe_once_it_is_saved_up_for() -> None:
    policy = make_policy("goodput", costs=make_costs(0.02, 0.0001))
    acceptance, dear_s = learnt(0.8), 0.05
    for _ in range(300):
        policy.lengths([], load_of(1))
        if policy.served([acceptance], [0.8], [dear_s]):
            break
        assert policy.served([acceptance], [0.8], [0.001]) == [0], "a short wait is worth it at any time"
    else:
        pytest.fail("it is never tried again")
    assert policy.served([acceptance], [0.8], [dear_s]) == [0], "nobody was asked to draft yet"
    policy.note_served()
    assert policy.served([acceptance], [0.8], [dear_s]) == []


# Held against the best length that never changes.


def _flat(num_seqs: int, num_tokens: int) -> float:
    return 0.02 + 0.0001 * num_tokens


def _cpu(num_seqs: int, num_tokens: int) -> float:
    return 0.021 + 0.0002 * num_tokens + 0.00045 * max(0, num_tokens - 8)


def _bound(num_seqs: int, num_tokens: int) -> float:
    return 0.002 + 0.001 * num_tokens


def _graph(num_seqs: int, num_tokens: int) -> float:
    return 0.003 if num_tokens == num_seqs else 0.009 + 0.00002 * num_tokens


def _knee(num_seqs: int, num_tokens: int) -> float:
    return 0.01 + 0.001 * max(0, num_tokens - 16)


CELLS = {
    "copied text, one stream": (Cell(lambda _: 0.9, 0.0, 1, _flat, 32), 800),
    "draft model, one stream": (Cell(lambda _: 0.8, 0.2, 1, _cpu), 800),
    "draft model, batch with a knee": (Cell(lambda _: 0.9, 0.1, 4, _knee, 16), 800),
    "known text, small batch": (Cell(lambda _: 0.5, 0.0, 8, _cpu), 500),
    "draft model, bound by arithmetic": (Cell(lambda _: 0.8, 0.2, 8, _bound), 2500),
    "draft model too slow": (Cell(lambda _: 0.4, 0.5, 1, _flat), 2000),
    "steps without drafts have a fast way": (Cell(lambda _: 0.6, 0.0, 4, _graph, 16), 2000),
    "garbage in a crowd": (Cell(lambda _: 0.02, 0.0, 32, _bound, 16), 600),
    "rate drifts": (Cell(lambda step: 0.9 if step // 500 % 2 == 0 else 0.2, 0.1, 2, _cpu), 2000),
}


@pytest.mark.parametrize("name", CELLS)
def test_goodput_is_within_5_percent_of_the_best_length(name: str) -> None:
    cell, num_steps = CELLS[name]

    def rate(seed: int) -> float:
        costs = PassCosts()
        policy = make_policy("goodput", costs=costs, max_drafts=cell.max_length)
        return run_policy(policy, costs, cell, num_steps, seed)

    assert sum(rate(seed) for seed in range(3)) / 3 >= 0.95 * cell.best_rate(num_steps)


def test_a_first_step_that_stalls_does_not_keep_drafts_short() -> None:
    costs = PassCosts()
    policy = make_policy("goodput", costs=costs, max_drafts=16)
    acceptance, lengths = learnt(0.9, 16), []
    for step in range(8):
        lengths += policy.lengths([Candidate(acceptance, 16)], load_of(1))
        costs.observe(1, 1 + lengths[-1], 0.3 if step == 0 else 0.02 + 0.0002 * lengths[-1])
    assert lengths[:3] == [4, 0, 0]
    assert lengths[-1] == 16


def test_always_drafting_much_is_what_the_cells_catch() -> None:
    def share(policy_name: LengthPolicyName, cell: Cell) -> float:
        policy = make_policy(policy_name, max_drafts=cell.max_length)
        return run_policy(policy, PassCosts(), cell, 300) / cell.best_rate(300)

    cells: Sequence[Cell] = [CELLS[name][0] for name in list(CELLS)[2:6]]
    assert all(share("fixed", cell) < 0.92 for cell in cells)


# Drafters that say how sure they are.


def told(num_drafts: int, chances: Sequence[float], *, is_tree: bool = False) -> Candidate:
    return Candidate(Acceptance(MethodPrior()), num_drafts, is_tree, chances)


def test_the_surest_drafts_of_all_requests_are_verified() -> None:
    policy = make_policy("goodput", costs=make_costs(0.004, 0.001, 3), max_drafts=8)
    candidates = [told(3, (0.95, 0.9, 0.2)), told(3, (0.1, 0.05, 0.04)), told(3, (0.6, 0.05, 0.04))]
    assert policy.lengths(candidates, load_of(3)) == [2, 0, 1]


def test_a_request_of_which_the_drafter_is_sure_gets_drafts_where_usual_ones_do_not_pay() -> None:
    policy = make_policy("goodput", costs=make_costs(0.004, 0.003, 4), max_drafts=8)
    usual = [Candidate(learnt(0.55), 2) for _ in range(4)]
    assert policy.lengths(usual, load_of(4)) == [0, 0, 0, 0]
    sure = [told(2, (0.55, 0.3)) for _ in range(3)] + [told(2, (0.99, 0.98))]
    assert policy.lengths(sure, load_of(4)) == [0, 0, 0, 2]


def test_a_free_draft_below_the_least_rate_is_not_verified_but_tried_now_and_then() -> None:
    policy = make_policy("goodput", costs=make_costs(0.01, 0.00001), max_drafts=8)
    acceptance = Acceptance(MethodPrior(is_free=True))
    lengths = []
    for _ in range(120):
        acceptance.expect(("suffix", False), [0.25])
        assert policy.wanted(acceptance, 8) == 8  # asking costs nothing
        lengths += policy.lengths([Candidate(acceptance, 1, chances=(0.25,))], load_of(1))
    assert sum(lengths) == 2 and lengths.index(1) == 49


def test_what_a_sure_drafter_brings_is_what_lies_above_the_price() -> None:
    policy = make_policy("goodput", costs=make_costs(0.004, 0.001, 2), max_drafts=8)
    acceptance = Acceptance(MethodPrior())
    for _ in range(60):
        chances = acceptance.expect(("heads", False), [0.9, 0.02])
        policy.lengths([Candidate(acceptance, 2, chances=chances)] * 2, load_of(2))
    price = policy.least_chance(acceptance)
    assert 0.2 < price < 0.6
    assert policy.gain(acceptance, 0, 2) == pytest.approx(0.9, abs=0.05)  # the second draft is left out
