"""The cases of a matrix that the default suite runs have every value of every parameter."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.by_default import Values, mark_the_others_slow, with_each_value


def matrix(**params: int) -> dict[str, Values]:
    """Each combination of so many values a parameter."""
    combined = product(*([(name, str(value)) for value in range(count)] for name, count in params.items()))
    return {"-".join(value for _, value in case): frozenset(case) for case in combined}


@pytest.mark.parametrize("params", [{"a": 7}, {"a": 5, "b": 2}, {"a": 3, "b": 4, "c": 2}, {"a": 1, "b": 1}])
def test_every_value_stays_in_as_few_cases_as_the_longest_parameter_has(params: dict[str, int]) -> None:
    cases = matrix(**params)
    stay = with_each_value(cases)
    assert set().union(*(cases[case] for case in stay)) == set().union(*cases.values())
    assert len(stay) == max(params.values())


def test_values_of_a_short_parameter_are_taken_by_turns() -> None:
    cases = matrix(family=12, dtype=3)
    uses = Counter(value for case in with_each_value(cases) for value in cases[case] if value[0] == "dtype")
    assert set(uses.values()) == {4}


class Case:
    """What is asked of a collected test."""

    def __init__(self, case: str, *names: str) -> None:
        self.nodeid = f"tests/test_it.py::test_it[{case}]"
        self.callspec = SimpleNamespace(params={"source": case})
        self.marks = [pytest.mark.by_default(*names).mark]
        self.is_slow = False

    def get_closest_marker(self, name: str) -> Any:
        return self.marks[0]

    def iter_markers(self, name: str) -> Any:
        return iter(self.marks)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "slow"
        self.is_slow = True


def slow_ones(*cases: Case, args: tuple[str, ...] = ("tests",)) -> list[bool]:
    config = SimpleNamespace(args=args, getoption=lambda name, default: default)
    mark_the_others_slow(cast(pytest.Config, config), cast(list[pytest.Item], list(cases)))
    return [case.is_slow for case in cases]


def test_what_is_not_named_is_slow() -> None:
    assert slow_ones(Case("a", "b"), Case("b", "b"), Case("c", "b")) == [True, False, True]
    assert slow_ones(Case("a"), Case("b")) == [False, False]


def test_a_name_that_is_no_case_is_refused_where_all_cases_are_there() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_it has no cases \['x'\]"):
        slow_ones(Case("a", "x"))
    assert slow_ones(Case("a", "b"), args=("tests/test_it.py::test_it[a]",)) == [True]
