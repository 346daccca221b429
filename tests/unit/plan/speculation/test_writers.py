"""Each field of the tapes, the links and their statistics is written by one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SPECULATION = "engine/plan/speculation"
WRITERS = {
    f"{SPECULATION}/draft_tape.py": {"drafted", "epoch", "num_late_tokens"},
    f"{SPECULATION}/speculative_decoder.py": {"waited_s", "num_in_flight", "features", "limit", "run_ahead"},
    f"{SPECULATION}/drafter_link.py": {"is_awaited", "author", "draft_s", "num_stale"},
    f"{SPECULATION}/spec_stats.py": {"dropped", "recent_proposed", "num_bonus"},
}
CHANGES = {"add", "append", "clear", "extend", "insert", "pop", "remove", "update"}


def written(source: str) -> set[str]:
    """The attributes that a module assigns, deletes or changes in place."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        target: ast.AST | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
        ):
            target = node.func.value
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            found.add(target.attr)
    return found


def test_the_reader_sees_every_kind_of_write() -> None:
    source = "a.b = 1\na.c[0] += 1\ndel a.d[:2]\na.e.clear()\nx, a.f = y\na.g.index(1)\nz = a.h\n"
    assert written(source) == {"b", "c", "d", "e", "f"}


@pytest.mark.parametrize("owner", WRITERS)
def test_one_module_writes_each_field(owner: str) -> None:
    tiers = [*ROOT.glob("engine/plan/**/*.py"), *ROOT.glob("engine/loop/**/*.py")]
    writers = {str(path.relative_to(ROOT)): written(path.read_text()) for path in tiers}
    assert writers[owner] >= WRITERS[owner]
    others = {path: names & WRITERS[owner] for path, names in writers.items() if path != owner}
    assert {path: names for path, names in others.items() if names} == {}
