"""What drafts gain: the clock and the formula agree where the formula's assumptions hold."""

from __future__ import annotations

from random import Random

import pytest

from engine.plan.speculation.recent_gain import NO_DRAFTS, FormulaTerms, RecentGain, theoretical_speedup


def test_before_the_first_round_drafts_gain_and_lose_nothing() -> None:
    gain = RecentGain()
    assert (gain.speedup, gain.terms.speedup, gain.draft_length) == (1.0, 1.0, 0.0)
    gain.begin_step()
    gain.note_waited(0.5)
    gain.observe_step(4, 4, 1.5, 1.0)
    assert gain.terms == NO_DRAFTS, "nothing was verified"
    assert gain.speedup == pytest.approx(1 / 1.5), "but it was waited for"


def step(gain: RecentGain, accepted: list[int], length: int, draft_s: float) -> None:
    """A synchronous one, whose target takes a second whatever it verifies."""
    gain.begin_step()
    gain.note_waited(length * draft_s)
    for count in accepted:
        gain.observe_round(length, length, count, is_cut=False)
    num_tokens = sum(accepted) + len(accepted)
    gain.observe_step(len(accepted), num_tokens, 1.0 + length * draft_s, 1.0)


@pytest.mark.parametrize(("alpha", "length", "draft_s"), [(0.8, 4, 0.1), (0.6, 7, 0.0), (0.9, 2, 0.4)])
def test_free_verification_of_independent_drafts_gains_what_the_formula_says(
    alpha: float, length: int, draft_s: float
) -> None:
    gain, random = RecentGain(), Random(5)
    for _ in range(400):
        accepted = []
        for _ in range(64):
            count = 0
            while count < length and random.random() < alpha:
                count += 1
            accepted.append(count)
        step(gain, accepted, length, draft_s)
    terms = gain.terms
    assert terms.alpha == pytest.approx(alpha, rel=0.03)
    assert terms.gamma == pytest.approx(length)
    assert terms.cost_ratio == pytest.approx(draft_s)
    assert terms.speedup == pytest.approx(theoretical_speedup(length, alpha, draft_s), rel=0.05)
    assert gain.speedup == pytest.approx(terms.speedup, rel=0.05)


def test_sequences_without_drafts_shorten_the_mean() -> None:
    gain = RecentGain()
    gain.begin_step()
    gain.observe_round(6, 6, 3, is_cut=False)
    gain.observe_step(3, 6, 1.0, 1.0)
    assert gain.draft_length == 6.0
    assert gain.terms.gamma == pytest.approx(2.0)
    assert gain.terms.alpha == 0.75, "the fourth was refused, the others nobody judged"


def test_a_request_that_ends_with_an_accepted_draft_refuses_none() -> None:
    gain = RecentGain()
    gain.observe_round(6, 6, 3, is_cut=True)
    gain.observe_step(1, 3, 1.0, 1.0)
    assert gain.terms.alpha == 1.0
    assert gain.terms.speedup == pytest.approx(7.0), "as if all six had gone on like this"


def test_of_a_tree_levels_count_and_not_nodes() -> None:
    gain = RecentGain()
    gain.observe_round(20, 4, 2, is_cut=False)
    gain.observe_step(1, 3, 1.0, 1.0)
    assert (gain.draft_length, gain.terms.gamma) == (20.0, 4.0)
    assert gain.terms.alpha == pytest.approx(2 / 3)


def test_steps_count_only_where_their_plain_time_is_known() -> None:
    gain = RecentGain()
    gain.observe_round(4, 4, 4, is_cut=False)
    gain.observe_step(1, 5, 1.0, None)
    gain.observe_step(1, 5, 0.0, 1.0)
    assert (gain.speedup, gain.terms.speedup) == (1.0, 1.0)


def test_what_is_logged_can_be_computed_again() -> None:
    figures = FormulaTerms(0.8, 4.0, 0.2).figures()
    assert figures == {
        "draft_theoretical_speedup": 1.8676,
        "draft_alpha": 0.8,
        "draft_gamma": 4.0,
        "draft_cost_ratio": 0.2,
    }
