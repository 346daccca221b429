from __future__ import annotations

import pytest

from engine.plan.speculation.recent_gain import expected_tokens, theoretical_speedup


def test_expected_tokens_sums_the_chances_of_each_length() -> None:
    assert expected_tokens(4, 0.8) == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)
    assert expected_tokens(0, 0.8) == 1
    assert expected_tokens(5, 1) == 6
    assert expected_tokens(5, 0) == 1


def test_speedup_by_hand() -> None:
    assert theoretical_speedup(4, 0.8, 0.0) == pytest.approx(3.3616)
    assert theoretical_speedup(4, 0.8, 0.2) == pytest.approx(3.3616 / 1.8)


@pytest.mark.parametrize(
    ("alpha", "cost", "best"), [(0.7, 0.1, 1.98), (0.8, 0.1, 2.47), (0.8, 0.2, 1.87), (0.9, 0.1, 3.43)]
)
def test_best_lengths(alpha: float, cost: float, best: float) -> None:
    """Tokens a step at the best length, as worked out when the schedules were designed."""
    found = max(theoretical_speedup(gamma, alpha, cost) for gamma in range(1, 40))
    assert found == pytest.approx(best, abs=0.006)
