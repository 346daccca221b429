"""The table of advisories is whole: every test that it names is there and runs."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.security.advisories import ADVISORIES

ROOT = Path(__file__).parents[2]
# These run on machines that have what they need; whoever is in the table must run everywhere.
ELSEWHERE = ("gpu", "bench", "browser", "prometheus", "ray", "image")


@cache
def found_in(file: str) -> dict[str, str]:
    """The test functions of a file, each with all its decorators."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "pytestmark"]  # fmt: skip
    return {
        node.name: " ".join([*marks, *map(ast.unparse, node.decorator_list)])
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("test", sorted({test for row in ADVISORIES for test in row.tests}))
def test_every_test_of_the_table_is_there_and_runs(test: str) -> None:
    file, _, name = test.partition("::")
    assert Path(file).name.startswith("test_")
    marks = found_in(file)[name]
    assert not [mark for mark in ELSEWHERE if f"mark.{mark}" in marks]
    assert "mark.skip(" not in marks and "xfail" not in marks


def test_every_class_is_there_once_and_has_a_test() -> None:
    assert all(row.tests and row.cause for row in ADVISORIES)
    ids = Counter(found for row in ADVISORIES for found in row.found)
    assert ids.most_common(1)[0][1] == 1
    assert len(ADVISORIES) >= 39
    assert sum(found.startswith(("CVE-", "GHSA-")) for found in ids) >= 80


def test_whoever_is_in_the_table_needs_more_than_slow_tests() -> None:
    for row in ADVISORIES:
        files = [test.partition("::")[::2] for test in row.tests]
        assert any("mark.slow" not in found_in(file)[name] for file, name in files), row.cause
