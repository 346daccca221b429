"""One module writes each field of a request, of the metrics and of what is drafted: see engine/README.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.request import Request
from engine.plan.speculation.draft_tape import DraftedSequence, DraftTape
from engine.plan.speculation.spec_stats import SpecStats

ROOT = Path(__file__).parents[2]
MUTATORS = frozenset(
    {"append", "extend", "insert", "pop", "popleft", "remove", "clear", "update", "add", "discard", "observe"}
)
WRITES_ITS_ARGUMENT = frozenset({"extend_block_hashes", "TokenGaps"})
# How code calls an object of each kind, but for `self` in its own class.
RECEIVERS: Mapping[str, frozenset[str]] = {
    "Request": frozenset({"request", "child", "parent", "victim", "lost", "other"}),
    "BatchMetrics": frozenset({"metrics", "_metrics"}),
    "DraftTape": frozenset({"tape"}),
    "DraftedSequence": frozenset({"sequence"}),
    "DraftView": frozenset({"view"}),
    "DrafterLink": frozenset({"link"}),
    "SpeculativeDecoder": frozenset({"decoder", "_decoder"}),
    "SpecStats": frozenset({"stats", "_stats"}),
}
FIELDS: Mapping[str, frozenset[str]] = {
    "Request": frozenset(field.name for field in fields(Request)),
    "BatchMetrics": frozenset(field.name for field in fields(BatchMetrics)),
    "DraftTape": frozenset(DraftTape.__slots__),
    "DraftedSequence": frozenset(field.name for field in fields(DraftedSequence)),
    "DraftView": frozenset({"limit", "max_tokens"}),
    "DrafterLink": frozenset({"is_awaited", "may_branch"}),
    "SpeculativeDecoder": frozenset({"is_crowded_out", "rules"}),
    "SpecStats": frozenset(field.name for field in fields(SpecStats)),
}


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """What a node writes: the targets of assignments and deletions, and the receivers of mutating calls."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        yield node.func.value
    elif (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WRITES_ITS_ARGUMENT
    ):
        yield from node.args


def written_by(source: str) -> set[tuple[str, str]]:
    """The (kind, field) pairs that a module writes."""
    found: set[tuple[str, str]] = set()

    def visit(node: ast.AST, class_name: str) -> None:
        for target in targets_of(node):
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                owner = target.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                for kind in FIELDS:
                    is_it = name in RECEIVERS[kind] or (name == "self" and class_name == kind)
                    if is_it and target.attr in FIELDS[kind]:
                        found.add((kind, target.attr))
        for child in ast.iter_child_nodes(node):
            visit(child, child.name if isinstance(child, ast.ClassDef) else class_name)

    visit(ast.parse(source), "")
    return found


def writers() -> dict[tuple[str, str], set[str]]:
    """For each (kind, field) the modules that write it, as paths below `engine` or `server`."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for folder in ("engine", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for pair in written_by(path.read_text(encoding="utf-8")):
                found[pair].add(str(path.relative_to(ROOT)))
    return found


def table() -> dict[tuple[str, str], str]:
    """What engine/README.md says: the module of each (kind, field)."""
    text = (ROOT / "engine" / "README.md").read_text(encoding="utf-8")
    section = text.split("## Who writes what", 1)[1].split("\n## ", 1)[0]
    said: dict[tuple[str, str], str] = {}
    for kind, module, names in re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \| (.+) \|$", section, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert (kind, name) not in said, f"{kind}.{name} stands in the table twice"
            said[kind, name] = module
    return said


def test_every_field_is_written_by_the_one_module_that_the_readme_names() -> None:
    assert writers() == {pair: {module} for pair, module in table().items()}


@pytest.mark.parametrize(
    "line",
    [
        "request.status = x",
        "token.request.num_computed_tokens += 1",
        "del request.token_ids[1:]",
        "a, request.priority = 1, 2",
        "request.preemptions.append(x)",
        "request.block_hashes[0] = x",
        "extend_block_hashes(request.block_hashes, 1)",
        "class Request:\n    def f(self) -> None:\n        self.status = 1",
        "self._metrics.engine_errors[x] += 1",
        "metrics.e2e_request_latency.observe(1.0)",
        "sequence.tape.epoch += 1",
        "sequence.features = x",
        "self._stats.num_late += 1",
    ],
)
def test_a_write_is_found(line: str) -> None:
    assert len(written_by(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "x = request.status",
        "request.append(x)",
        "class Reply:\n    def f(self) -> None:\n        self.status = 1",
    ],
)
def test_what_is_no_write_is_passed_over(line: str) -> None:
    assert not written_by(line)
