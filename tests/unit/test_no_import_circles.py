"""No module of the product imports itself, however many others stand between; imports for types count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("config", "engine", "server")

Graph = Mapping[str, set[str]]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, modules: frozenset[str]) -> Iterator[str]:
    """Those of `modules` that `source` imports anywhere: at its top, in a function, under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in modules else node.module
                if target in modules:
                    yield target


def import_graph(root: Path, packages: tuple[str, ...] = PACKAGES) -> Graph:
    paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    names = {module_name(path, root): path for path in paths}
    modules = frozenset(names)
    return {name: set(imported(path.read_text(), modules)) for name, path in names.items()}


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    left = [*graph[start]]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph[name]
    return found


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """The strongly connected components of more than one module, and modules that import themselves."""
    reach = {name: reachable(graph, name) for name in graph}
    circular = {name for name in graph if name in reach[name]}
    return sorted(
        {
            tuple(sorted(other for other in circular & reach[name] if name in reach[other]))
            for name in circular
        }
    )


def test_there_is_no_import_circle() -> None:
    assert circles(import_graph(ROOT)) == []


def test_a_circle_for_types_or_within_a_function_is_found(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("if TYPE_CHECKING:\n    from pack.b import B\n")
    (package / "b.py").write_text("def build():\n    from pack import c\n")
    (package / "c.py").write_text("import pack.a\n")
    (package / "d.py").write_text("from pack import a\n")
    assert circles(import_graph(tmp_path, ("pack",))) == [("pack.a", "pack.b", "pack.c")]
