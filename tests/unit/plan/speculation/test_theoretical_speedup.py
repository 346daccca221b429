from __future__ import annotations

import pytest

from engine.plan.speculation.theoretical_speedup import (
    chain_hit_rate,
    enumerated_speedup,
    expected_tokens,
    free_speedup,
    lanes_speedup,
    outcome_hit_rate,
    replicated_bound,
    run_ahead_speedup,
    theoretical_speedup,
    waiting_speedup,
)

LENGTHS = range(1, 40)


def test_expected_tokens_sums_the_chances_of_each_length() -> None:
    assert expected_tokens(4, 0.8) == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert expected_tokens(0, 0.8) == 1
    assert expected_tokens(5, 1) == 6
    assert expected_tokens(5, 0) == 1


def test_speedup_by_hand() -> None:
    assert theoretical_speedup(4, 0.8) == pytest.approx(3.3616)
    assert theoretical_speedup(4, 0.8, 0.2) == pytest.approx(3.3616 / 1.8)
    assert theoretical_speedup(4, 0.8, 0.2, verify_cost=1.2) == pytest.approx(3.3616 / 2)


# Tokens a step at the best length, as worked out when drafting ahead was designed: drafting first; drafting
# ahead for 1, 4 and 8 results; and what drafting ahead for one gains when it slows the target by 1.25.
TABLE = [
    (0.7, 0.1, 1.98, 2.11, 2.52, 2.74, 0.88),
    (0.8, 0.1, 2.47, 2.70, 3.22, 3.59, 0.93),
    (0.8, 0.2, 1.87, 2.28, 2.77, 3.09, 1.01),
    (0.9, 0.1, 3.43, 4.20, 4.77, 5.28, 1.03),
    (0.9, 0.2, 2.37, 3.13, 3.54, 3.85, 1.09),
]


@pytest.mark.parametrize(("alpha", "cost", "sync", "one", "four", "eight", "slowed"), TABLE)
def test_best_lengths(
    alpha: float, cost: float, sync: float, one: float, four: float, eight: float, slowed: float
) -> None:
    best = max(theoretical_speedup(gamma, alpha, cost) for gamma in LENGTHS)
    assert best == pytest.approx(sync, abs=0.006)
    for num_outcomes, expected in ((1, one), (4, four), (8, eight)):
        ahead = max(run_ahead_speedup(gamma, alpha, cost, num_outcomes=num_outcomes) for gamma in LENGTHS)
        # The first row was taken from a simulation that mixes waiting and going free.
        assert ahead == pytest.approx(expected, rel=0.02 if alpha == 0.7 else 0.003)
    ahead = max(run_ahead_speedup(gamma, alpha, cost, slowdown=1.25) for gamma in LENGTHS)
    assert ahead / best == pytest.approx(slowed, abs=0.006)


def test_hit_rates() -> None:
    assert chain_hit_rate(4, 0.8) == pytest.approx(0.8**5)
    rates = [round(outcome_hit_rate(4, 0.8, count), 2) for count in (1, 4, 8, 16)]
    assert rates == [0.33, 0.67, 0.87, 0.97]


def test_going_free_agrees_with_its_simulation_and_its_closed_form() -> None:
    assert free_speedup(4, 0.8) == pytest.approx(2.2832, abs=1e-4)
    closed = expected_tokens(4, 0.8) / (1 + 0.8 - 0.8**5)
    assert free_speedup(4, 0.8) == pytest.approx(closed)
    assert free_speedup(4, 0.8, slowdown=1.25) == pytest.approx(closed / 1.25)
    assert free_speedup(4, 1.0) == 5


@pytest.mark.parametrize("gamma", [2, 4, 6])
def test_going_free_beats_waiting_where_drafts_are_dear(gamma: int) -> None:
    alpha = 0.8
    limit = alpha * (1 - alpha**gamma) / (1 - alpha ** (gamma + 1)) / gamma
    assert free_speedup(gamma, alpha) > waiting_speedup(gamma, alpha, limit * 1.01, hit_rate=None) or (
        (gamma + 1) * limit > 1
    )
    cheap = limit * 0.5
    assert free_speedup(gamma, alpha) < waiting_speedup(gamma, alpha, cheap)


def test_waiting_pays_for_drafts_that_a_step_is_too_short_for() -> None:
    hit = 0.8**5
    # Two drafts fit into a step, so a hit waits for three more, a miss for four.
    expected = expected_tokens(4, 0.8) / (1 + (1 - hit) * 4 * 0.5 + hit * 3 * 0.5)
    assert waiting_speedup(4, 0.8, 0.5) == pytest.approx(expected)
    assert waiting_speedup(4, 0.8, 0.0) == pytest.approx(theoretical_speedup(4, 0.8))


@pytest.mark.parametrize(("fixed_share", "gain"), [(1.0, 0.70), (0.3, 1.08), (0.0, 1.40)])
def test_lanes_over_drafting_first(fixed_share: float, gain: float) -> None:
    lanes = lanes_speedup(4, 0.8, 0.1, fixed_share=fixed_share)
    assert lanes / theoretical_speedup(4, 0.8, 0.1) == pytest.approx(gain, abs=0.005)


def test_other_bounds() -> None:
    assert enumerated_speedup(1, 4, 1, draft_cost=0.5, backup_cost=0.2) == 4
    assert enumerated_speedup(0, 4, 1.2, draft_cost=0.5, backup_cost=0.2) == pytest.approx(1)
    assert enumerated_speedup(0.5, 4, 2, draft_cost=2, backup_cost=0.5) == pytest.approx(3 / 1.75)
    assert replicated_bound(0.8, 0.1) == pytest.approx(1 / 0.28)
