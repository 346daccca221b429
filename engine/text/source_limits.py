"""What a request may ask to be compiled: small enough that no source costs more than about a second.

The compiler has limits of its own, but some of its work grows with the square of the source before they
apply; measured, these keep that part in bounds. Every refusal names the limit and the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

MAX_SOURCE_CHARS = 65_536
MAX_GRAMMAR_CHARS = 32_768
MAX_RULES = 256
MAX_OPERATORS = 1000  # of all patterns together
MAX_INTERSECTIONS = 16  # with complements: each may double the compiler's work, whatever fuel it has
MAX_SCHEMA_DEPTH = 64
MAX_PROPERTIES = 1000  # of one object

_OPERATORS = re.compile(r"[*+?{&~]")
_RULE = re.compile(r"^[?!]?\w[\w.\-]*\s*(?:\[[^\]]*\]\s*)?(?::|::=)", re.MULTILINE)
# Keywords of earlier drafts that would go unheard; what else is not supported the compiler names itself.
_UNHEARD = ("divisibleBy", "disallow", "extends", "x-guidance")


def check_size(source: str) -> None:
    """Raise ValueError for a source of any kind that is too long."""
    _check("the source", len(source), MAX_SOURCE_CHARS, "characters")


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a regular expression that may take too long."""
    _check("the expression", _num_operators(pattern), MAX_OPERATORS, "repetitions and operators")


def check_grammar(source: str) -> None:
    """Raise ValueError for a Lark or EBNF grammar that may take too long."""
    _check("the grammar", len(source), MAX_GRAMMAR_CHARS, "characters")
    _check("the grammar", len(_RULE.findall(source)), MAX_RULES, "rules")
    _check("the grammar", _num_operators(source), MAX_OPERATORS, "repetitions and operators")
    num_intersections = source.count("&") + source.count("~")
    _check("the grammar", num_intersections, MAX_INTERSECTIONS, "intersections and complements ('&' and '~')")


def check_schema(schema: Mapping[str, object]) -> None:
    """Raise ValueError for a JSON schema that is too deep, may take too long or would not be honoured."""
    num_operators = 0
    for value, depth in _walk(schema):
        _check("the schema", depth, MAX_SCHEMA_DEPTH, "levels")
        if not isinstance(value, dict):
            continue
        for keyword in _UNHEARD:
            if keyword in value:
                raise ValueError(f"the keyword '{keyword}' is not supported")
        num_operators += _num_operators(value.get("pattern"))
        patterns, properties = value.get("patternProperties"), value.get("properties")
        if isinstance(patterns, dict):
            num_operators += sum(map(_num_operators, patterns))
        if isinstance(properties, dict):
            _check("an object of the schema", len(properties), MAX_PROPERTIES, "properties")
    _check("the schema", num_operators, MAX_OPERATORS, "repetitions and operators in its patterns")


def _walk(value: object) -> Iterator[tuple[object, int]]:
    """Every value inside and how deep it lies, without recursion; no deeper than is of interest."""
    pending = [(value, 1)]
    while pending:
        value, depth = pending.pop()
        yield value, depth
        if isinstance(value, dict):
            pending += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            pending += [(each, depth + 1) for each in value]


def _num_operators(pattern: object) -> int:
    return len(_OPERATORS.findall(pattern)) if isinstance(pattern, str) else 0


def _check(what: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise ValueError(f"{what} has {count} {unit}; the limit is {limit}")
