"""Which cases of a matrix the default suite runs; its others are slow, so that `make test-slow` runs them.

    @pytest.mark.by_default
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("family", FAMILIES)

keeps few cases, among which is each value of each parameter, all of them about as often. Where more is known,
as that a case is quick or once was a bug, the test names the ids of those that stay:

    @pytest.mark.by_default("n-gram-sync", "suffix-async")
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest

Values = frozenset[tuple[str, str]]  # of one case: each parameter's name and value


def mark_the_others_slow(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark the cases of each test that says so, but for those that stay.

    Raises UsageError for a name that is no case, where tests were asked for by whole files: a test whose
    cases were renamed would be left out of the default suite and nobody would know.
    """
    tests: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("by_default") is not None:
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            tests[test][case] = item
    is_part = any("::" in arg for arg in config.args) or config.getoption("lf", False)
    for test, cases in tests.items():
        names = [
            name for item in cases.values() for mark in item.iter_markers("by_default") for name in mark.args
        ]
        if not is_part and (unknown := set(names) - set(cases)):
            raise pytest.UsageError(f"{test} has no cases {sorted(unknown)}")
        stay = set(names) or with_each_value({case: values_of(item) for case, item in cases.items()})
        for case, item in cases.items():
            if case not in stay:
                item.add_marker(pytest.mark.slow)


def values_of(item: pytest.Item) -> Values:
    """What a case was made from."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return frozenset((name, repr(value)) for name, value in params.items())


def with_each_value(cases: Mapping[str, Values]) -> set[str]:
    """Few cases that have all values together: the one next that adds most, then whose values are rare."""
    left = set().union(*cases.values())
    uses: Counter[tuple[str, str]] = Counter()
    found: set[str] = set()
    while left:
        best = min(
            cases, key=lambda case: (-len(cases[case] & left), sum(uses[each] for each in cases[case]))
        )
        found.add(best)
        left -= cases[best]
        uses.update(cases[best])
    return found
