from __future__ import annotations

from random import Random

import pytest

from engine.plan.speculation.acceptance import Acceptance, MethodPrior


def test_nothing_known_starts_high_and_falls_along_the_draft() -> None:
    survival = Acceptance(MethodPrior()).survival(3)
    assert survival == pytest.approx([0.75, 0.75**2, 0.75**3])


def test_only_drafts_behind_accepted_ones_are_judged() -> None:
    acceptance = Acceptance(MethodPrior())
    acceptance.observe(4, 1)
    believed = [(1 + 4 * 0.75) / 5, 4 * 0.8 / 5]  # by the method, which has learnt of this round too
    first = (1 + 4 * believed[0]) / 5
    # What the first place differs from what was believed of it carries over in part.
    second = 4 * (believed[1] + 0.7 * (first - believed[0])) / 5
    assert acceptance.survival(2) == pytest.approx([first, first * second])
    assert (acceptance.num_rounds, acceptance.num_proposed) == (1, 4)
    assert acceptance.rate == pytest.approx((1 + 4 * believed[0]) / 6)
    assert acceptance.round_rate == 1 / 4


def test_an_empty_round_is_none() -> None:
    acceptance = Acceptance(MethodPrior())
    acceptance.observe(0, 0)
    acceptance.observe_tree(0, [])
    assert acceptance.num_rounds == 0
    assert acceptance.round_rate == 0


def test_an_observation_counts_half_after_32_more() -> None:
    acceptance, prior = Acceptance(MethodPrior()), 0.75
    for _ in range(400):
        acceptance.observe(1, 1)
    for _ in range(32):
        acceptance.observe(1, 0)
    total = 1 / (1 - 0.5 ** (1 / 32))
    assert acceptance.survival(1)[0] == pytest.approx((total / 2 + 4 * prior) / (total + 4), abs=0.06)


def test_places_are_learnt_apart() -> None:
    acceptance, random = Acceptance(MethodPrior()), Random(3)
    chances = [0.5, 0.9, 0.9, 0.2]
    for _ in range(600):
        accepted = 0
        while accepted < 4 and random.random() < chances[accepted]:
            accepted += 1
        acceptance.observe(4, accepted)
    expected = [0.5, 0.45, 0.405, 0.081]
    assert acceptance.survival(4) == pytest.approx(expected, abs=0.12)


def test_a_new_request_starts_where_its_method_is() -> None:
    prior = MethodPrior()
    first = Acceptance(prior)
    for _ in range(200):
        first.observe(4, 0)
    assert Acceptance(prior).survival(1)[0] < 0.1
    assert Acceptance(prior).rate < 0.1
    assert Acceptance(MethodPrior()).survival(1)[0] == 0.75


def test_a_request_may_differ_from_its_method() -> None:
    prior = MethodPrior()
    poor, good = Acceptance(prior), Acceptance(prior)
    for _ in range(200):
        poor.observe(4, 0)
    for _ in range(12):
        good.observe(4, 4)
    assert poor.survival(1)[0] < 0.1
    assert good.survival(1)[0] > 0.6


def test_reach_counts_leading_drafts_with_enough_of_a_chance() -> None:
    acceptance = Acceptance(MethodPrior())
    assert acceptance.reach(0.3, 32) == 4  # 0.75 to the fourth is 0.316
    assert acceptance.reach(0.3, 3) == 3
    assert acceptance.reach(0.8, 32) == 0
    assert acceptance.reach(0.0, 7) == 7


def test_nodes_of_a_tree_are_all_judged() -> None:
    acceptance, random = Acceptance(MethodPrior()), Random(5)
    # Three children of the root, then a child of the second.
    chances = [0.5, 0.3, 0.1]
    for _ in range(1500):
        draw, accepted = random.random(), []
        for node, chance in enumerate(chances):
            if draw < chance:
                accepted = [node, 3] if node == 1 and random.random() < 0.5 else [node]
                break
            draw -= chance
        acceptance.observe_tree(4, accepted)
    survival = acceptance.survival(4)
    # The last two, 0.1 and 0.15, are evened out.
    assert survival == pytest.approx([0.5, 0.3, 0.125, 0.125], abs=0.1)
    assert survival[2] == survival[3]
    assert survival == sorted(survival, reverse=True)


def test_requests_of_a_tree_method_start_as_trees() -> None:
    prior = MethodPrior()
    first = Acceptance(prior)
    for _ in range(300):
        first.observe_tree(3, [1])
    survival = Acceptance(prior).survival(3)
    assert sum(survival) == pytest.approx(1, abs=0.05)


def test_bad_luck_far_along_is_forgotten_while_drafts_are_too_short_to_refute_it() -> None:
    prior = MethodPrior()
    others, acceptance = Acceptance(prior), Acceptance(prior)
    for _ in range(400):
        others.observe(4, 4)
    for _ in range(12):
        acceptance.observe(4, 3)
    assert acceptance.survival(4)[3] < 0.35
    for _ in range(200):
        acceptance.observe(3, 3)
    assert acceptance.survival(4)[3] > 0.8


TEXT = ("suffix", False)


def test_what_a_drafter_says_of_each_draft_counts_and_not_its_place() -> None:
    acceptance, random = Acceptance(MethodPrior()), Random(8)
    for _ in range(400):
        stated = [0.9, 0.8] if random.random() < 0.5 else [0.2, 0.1]
        acceptance.expect(TEXT, stated)
        came = random.random() < stated[0]
        acceptance.learn(TEXT, stated, [0, 1] if came else [])
        acceptance.observe(2, 2 * came)
    sure, unsure = acceptance.believe(TEXT, [0.9])[0], acceptance.believe(TEXT, [0.2])[0]
    assert sure == pytest.approx(0.9, abs=0.08)
    assert unsure == pytest.approx(0.2, abs=0.08)
    assert acceptance.is_told
    assert acceptance.survival(2) == pytest.approx([0.55, 0.55], abs=0.12)  # of drafts as they come


def test_a_request_whose_drafts_come_less_often_than_others_is_believed_less() -> None:
    prior = MethodPrior()
    usual, poor = Acceptance(prior), Acceptance(prior)
    for _ in range(200):
        usual.learn(TEXT, [0.6], [0])
        usual.learn(TEXT, [0.6], [])
    for _ in range(40):
        poor.learn(TEXT, [0.6], [])
        usual.learn(TEXT, [0.6], [0])
    assert poor.believe(TEXT, [0.6])[0] < 0.6 * usual.believe(TEXT, [0.6])[0]
    assert poor.believe(TEXT, [0.6])[0] > 0


def test_kinds_of_drafts_are_known_apart() -> None:
    acceptance = Acceptance(MethodPrior())
    for _ in range(200):
        acceptance.learn(("heads", False), [0.5], [0])
        acceptance.learn(("heads", True), [0.5], [])
    greedy, sampled = (acceptance.believe(("heads", samples), [0.5])[0] for samples in (False, True))
    assert greedy > 0.9 and sampled < 0.1
