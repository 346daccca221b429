"""Enough of PromQL to say which metrics and labels an expression asks for."""

from __future__ import annotations

import re

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)?\s*\{([^}]*)\}")
_CLAUSE = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^]]*\]")
_NAME = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:(])")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "by", "without", "on", "ignoring"}


def metric_names(expr: str) -> set[str]:
    """The series that `expr` reads, functions and labels left out."""
    bare = _RANGE.sub(" ", _STRING.sub('""', expr))
    bare = _CLAUSE.sub(" ", bare)
    bare = _SELECTOR.sub(lambda match: f" {match[1] or ''} ", bare)
    return {name for name in _NAME.findall(bare) if name.lower() not in _WORDS}


def label_values(expr: str) -> list[tuple[str, str, str]]:
    """(metric, label, value as written) of each matcher of each selector in `expr`."""
    found = []
    for metric, matchers in _SELECTOR.findall(expr):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            found.append((metric, label, value))
    return found


def kept_labels(expr: str) -> set[str]:
    """The labels that clauses such as `by (…)` name."""
    bare = _STRING.sub('""', expr)
    return {label.strip() for _, names in _CLAUSE.findall(bare) for label in names.split(",")} - {""}
