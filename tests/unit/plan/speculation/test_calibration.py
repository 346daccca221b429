"""Calibration: a drafter's word before anything is known, and what came of it afterwards."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.speculation.calibration import Calibration

CHANCES = st.floats(0, 1)


def test_before_anything_is_known_a_drafter_is_taken_at_its_word() -> None:
    calibration = Calibration()
    assert calibration.read([0.0, 0.13, 0.5, 0.97, 1.0]) == pytest.approx([0.0, 0.13, 0.5, 0.97, 1.0])
    assert calibration.least_stated(0.42) == pytest.approx(0.42)


def test_one_that_says_too_little_is_believed_more() -> None:
    calibration, random = Calibration(), Random(4)
    for _ in range(4000):
        stated = random.random()
        calibration.observe([stated], [random.random() < stated**0.5])
    for stated in (0.1, 0.3, 0.6, 0.9):
        assert calibration.read([stated])[0] == pytest.approx(stated**0.5, abs=0.08)
        assert calibration.least_stated(stated**0.5) == pytest.approx(stated, abs=0.12)


def test_what_changes_is_followed() -> None:
    calibration = Calibration()
    for came in (True, False):
        for _ in range(3000):
            calibration.observe([0.5], [came])
        assert calibration.read([0.5])[0] == pytest.approx(float(came), abs=0.03)


def test_none_is_worth_more_than_any_ever_was() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.observe([1.0, 0.9, 0.8], [False, False, False])
    assert calibration.least_stated(0.9) == 1.0
    assert calibration.least_stated(0.0) == 0.0


@given(
    seen=st.lists(st.tuples(CHANCES, st.booleans()), max_size=200),
    asked=st.lists(CHANCES, min_size=2, max_size=20),
    wanted=CHANCES,
)
def test_the_curve_stays_within_0_and_1_and_never_falls(
    seen: list[tuple[float, bool]], asked: list[float], wanted: float
) -> None:
    calibration = Calibration()
    for stated, came in seen:
        calibration.observe([stated], [came])
    found = calibration.read(sorted(asked))
    assert all(0 <= value <= 1 for value in found)
    assert all(low <= high + 1e-9 for low, high in pairwise(found))
    least = calibration.least_stated(wanted)
    assert 0 <= least <= 1
    assert least == 1.0 or calibration.read([least])[0] >= wanted - 1e-9
