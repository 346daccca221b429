from __future__ import annotations

from copy import deepcopy

import pytest

from engine.plan.speculation.spec_stats import SpecStats


def make_stats() -> SpecStats:
    """Four rounds: all of 3 accepted, 1 of 4, none of 2, and 2 of 2 where the first ended the request."""
    stats = SpecStats()
    stats.observe_round("ngram", 3, 3, 4)
    stats.observe_round("ngram", 4, 1, 2)
    stats.observe_round("draft_model", 2, 0, 1)
    stats.observe_round("ngram", 2, 2, 1)
    return stats


def test_counts_by_hand() -> None:
    stats = make_stats()
    assert stats.num_rounds == 4
    assert stats.proposed == {"ngram": 9, "draft_model": 2}
    assert stats.accepted == {"ngram": 6, "draft_model": 0}
    assert (stats.num_proposed, stats.num_accepted) == (11, 6)
    assert (stats.num_bonus, stats.num_recovered, stats.num_committed) == (1, 2, 8)
    assert stats.accepted_per_position == [3, 2, 1]
    assert stats.acceptance_histogram == [1, 1, 1, 1]
    assert stats.acceptance_rate == pytest.approx(6 / 11)
    assert stats.mean_acceptance_length == 2.5


def test_nothing_drafted_is_all_zeros() -> None:
    stats = SpecStats()
    assert stats.acceptance_rate == stats.recent.ratio == 0
    assert stats.mean_acceptance_length == 0


def test_recent_acceptance_halves_a_round_in_32_more() -> None:
    stats = SpecStats()
    stats.observe_round("ngram", 4, 4, 5)
    assert stats.recent.ratio == 1
    for _ in range(32):
        stats.observe_round("ngram", 4, 0, 1)
    kept = 0.5 ** (1 / 32)
    assert stats.recent.ratio == pytest.approx(0.5 / sum(kept**age for age in range(33)))
    assert stats.acceptance_rate == pytest.approx(1 / 33)


def test_adding_is_as_if_both_had_been_counted_here() -> None:
    total, other = make_stats(), SpecStats()
    other.observe_round("suffix", 5, 5, 6)
    other.dropped["stale"] += 3
    other.run_ahead["hit"] += 2
    other.num_fallbacks, other.num_late, other.num_stale = 1, 2, 3
    other.draft_s, other.verify_s = 0.25, 0.5
    before = deepcopy(other)
    total.add(other)
    assert other == before
    assert total.accepted_per_position == [4, 3, 2, 1, 1]
    assert total.acceptance_histogram == [1, 1, 1, 1, 0, 1]
    assert total.proposed == {"ngram": 9, "draft_model": 2, "suffix": 5}
    assert (total.num_rounds, total.num_committed, total.num_bonus, total.num_recovered) == (5, 14, 2, 2)
    assert (total.num_fallbacks, total.num_late, total.num_stale) == (1, 2, 3)
    assert (total.draft_s, total.verify_s) == (0.25, 0.5)
    assert (total.dropped, total.run_ahead) == ({"stale": 3}, {"hit": 2})
    other.add(make_stats())
    assert other.num_accepted == total.num_accepted
    assert other.recent.ratio == pytest.approx(total.recent.ratio)
