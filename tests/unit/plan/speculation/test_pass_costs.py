from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from engine.plan.speculation.pass_costs import PassCosts


def test_nothing_seen_is_unknown() -> None:
    costs = PassCosts()
    assert costs.seconds(1, 1) is None
    assert costs.run(1, 1, 4) is None
    costs.observe(0, 4, 1.0)
    costs.observe(4, 2, 1.0)
    costs.observe(1, 1, 0.0)
    assert costs.seconds(1, 1) is None


def test_an_affine_machine_is_learnt_and_read_between_and_beyond() -> None:
    costs = PassCosts()
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20):
        costs.observe(1, num_tokens, 0.02 + 0.001 * num_tokens)
    for num_tokens in (1, 3, 9, 13, 18):
        assert costs.seconds(1, num_tokens) == pytest.approx(0.02 + 0.001 * num_tokens, rel=0.02)
    beyond = costs.seconds(1, 60)
    assert beyond is not None and 0.04 < beyond < 0.08  # a guess, not above the straight line
    run = costs.run(1, 4, 3)
    assert run is not None
    assert list(run) == [costs.seconds(1, n) for n in (4, 5, 6, 7)]


def test_more_tokens_never_cost_less() -> None:
    costs, random = PassCosts(), Random(1)
    for _ in range(600):
        num_seqs = random.randint(1, 8)
        num_tokens = num_seqs * random.randint(1, 9)
        costs.observe(num_seqs, num_tokens, random.uniform(0.01, 0.03))
    for num_seqs in (1, 3, 8, 20):
        run = costs.run(num_seqs, num_seqs, 200)
        assert run is not None
        assert all(after >= before for before, after in pairwise(run))


def test_steps_without_drafts_are_kept_apart() -> None:
    costs = PassCosts()
    for _ in range(3):
        costs.observe(4, 4, 0.003)
        costs.observe(4, 5, 0.009)
        costs.observe(4, 8, 0.010)
    assert costs.seconds(4, 4) == pytest.approx(0.003)
    assert costs.seconds(4, 5) == pytest.approx(0.009)


def test_passes_without_drafts_are_told_for_all_sizes_at_once() -> None:
    costs = PassCosts()
    assert not costs.is_known
    assert costs.plain(3) is None
    costs.seed([(1, 1, 0.01), (5, 5, 0.03)])
    assert costs.is_known
    told = costs.plain(6)
    assert told is not None
    assert told.tolist() == pytest.approx([0.01, 0.015, 0.02, 0.025, 0.03, 0.03])
    assert told[2] == pytest.approx(costs.seconds(3, 3))


def test_a_machine_that_changes_its_pace_makes_no_size_dearer_than_another() -> None:
    """Sizes are seen at different times: the one seen last must not pay for all that changed meanwhile."""
    costs = PassCosts()
    for _ in range(20):
        costs.observe(1, 1, 0.010)
        costs.observe(1, 2, 0.0105)
        costs.observe(1, 3, 0.011)
    for _ in range(100):
        costs.observe(1, 1, 0.015)
        costs.observe(1, 3, 0.0165)
    run = costs.run(1, 1, 2)
    assert run is not None
    assert run[0] == pytest.approx(0.015, rel=0.05)
    assert run[1] == pytest.approx(1.5 * 0.0105, rel=0.1), "it was not seen since"


def test_a_size_that_was_dear_by_accident_becomes_cheap_enough_to_be_tried() -> None:
    costs = PassCosts()
    for _ in range(8):
        costs.observe(1, 1, 0.010)
        costs.observe(1, 2, 0.0105)
        costs.observe(1, 3, 0.030)
    before = costs.seconds(1, 3)
    for _ in range(500):
        costs.observe(1, 2, 0.0105)
    assert costs.seconds(1, 3) == before, "it is as good as just seen"
    for _ in range(450):
        costs.observe(1, 2, 0.0105)
    after = costs.seconds(1, 3)
    assert before is not None and after is not None and after < 0.8 * before


def test_what_was_not_seen_for_long_gives_way_sooner() -> None:
    found = []
    for num_steps_between in (0, 1000):
        costs = PassCosts()
        for _ in range(16):
            costs.observe(1, 1, 0.010)
            costs.observe(1, 3, 0.030)
        for _ in range(num_steps_between):
            costs.observe(1, 1, 0.010)
        for _ in range(4):
            costs.observe(1, 1, 0.010)
            costs.observe(1, 3, 0.020)
        found.append(costs.seconds(1, 3) or 0.0)
    at_once, later = found
    assert later < at_once - 0.0005


def test_the_size_not_seen_is_guessed_from_the_nearest() -> None:
    costs = PassCosts()
    costs.observe(2, 2, 0.010)
    assert costs.seconds(2, 40) == pytest.approx(0.010)  # nothing speaks against it
    for _ in range(2):
        costs.observe(16, 16, 0.020)
    assert costs.seconds(2, 16) == pytest.approx(0.020)  # sixteen sequences took as long
    costs.observe(2, 16, 0.030)
    costs.observe(2, 16, 0.030)
    assert costs.seconds(3, 16) == pytest.approx(0.030)


def test_a_stall_is_no_cost() -> None:
    costs = PassCosts()
    for step in range(40):
        costs.observe(1, 1, 0.2 if step % 10 == 5 else 0.02)
    assert costs.seconds(1, 1) == pytest.approx(0.02, rel=0.05)
    costs.observe(1, 5, 0.5)  # a first look
    first = costs.seconds(1, 5)
    assert first is not None and first < 0.04
    costs.observe(1, 5, 0.022)
    assert costs.seconds(1, 5) == pytest.approx(0.022)


def test_a_true_cost_shows_by_the_second_look() -> None:
    costs = PassCosts()
    for _ in range(20):
        costs.observe(1, 1, 0.003)
    costs.observe(1, 5, 0.012)
    costs.observe(1, 5, 0.012)
    assert costs.seconds(1, 5) == pytest.approx(0.012)


def test_a_machine_that_changes_is_followed() -> None:
    costs = PassCosts()
    for _ in range(100):
        costs.observe(1, 1, 0.02)
    costs.observe(1, 1, 0.005)
    assert costs.seconds(1, 1) == pytest.approx(0.005)
    for _ in range(120):
        costs.observe(1, 1, 0.02)
    assert costs.seconds(1, 1) == pytest.approx(0.02, rel=0.05)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    costs = PassCosts()
    costs.observe(1, 1, 0.02)
    for _ in range(5):
        costs.observe(1, 9, 0.09)
    costs.observe(1, 3, 0.021)
    costs.observe(1, 3, 0.021)
    assert costs.seconds(1, 9) == pytest.approx(0.09)
    for _ in range(1400):
        costs.observe(1, 3, 0.021)
    looser = costs.seconds(1, 9)
    assert looser is not None and looser < 0.03


def test_a_step_without_drafts_is_wanted_now_and_then() -> None:
    costs = PassCosts()
    for _ in range(2):  # the first may have been a stall
        assert costs.needs_plain(4)
        costs.observe(4, 4, 0.01)
    assert not costs.needs_plain(4)
    for _ in range(256):
        costs.observe(4, 9, 0.01)
        assert not costs.needs_plain(4)
    costs.observe(4, 9, 0.01)
    assert costs.needs_plain(4)


def test_a_profile_is_believed() -> None:
    costs = PassCosts()
    costs.seed([(1, 1, 0.020), (1, 9, 0.024), (8, 8, 0.022)])
    assert costs.seconds(1, 1) == pytest.approx(0.020)
    assert costs.seconds(1, 9) == pytest.approx(0.024)
    assert costs.seconds(8, 8) == pytest.approx(0.022)


def test_memory_is_bounded() -> None:
    costs = PassCosts()
    for num_seqs in range(1, 1025, 3):
        for length in (1, 2, 3, 5, 9, 33):
            costs.observe(num_seqs, num_seqs * length, 0.01)
    assert sum(len(curve.knots()) for curve in [costs._plain, *costs._wider]) < 400


def test_steps_that_are_now_slow_now_fast_make_no_other_size_dearer() -> None:
    costs = PassCosts()
    costs.observe(16, 16, 0.004)
    costs.observe(16, 16, 0.004)
    for _ in range(40):
        for seconds in (*[0.013] * 10, *[0.0044] * 4):
            costs.observe(16, 80, seconds)
    assert costs.seconds(16, 16) == pytest.approx(0.004, rel=0.2)
