"""Twenty JSON schemas as people write them, small enough for a tiny random model to fill in."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.plan.grammar import TokenMask
from engine.text.grammar_compiler import FollowableGrammar, GrammarCompiler
from engine.text.structured_output import StructuredOutput
from tests.support.engines import text_tokenizer
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE

_NAME = {"type": "string", "minLength": 1, "maxLength": 6}
_TREE = {
    "type": "object",
    "properties": {"leaf": {"enum": ["oak", "elm"]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["leaf", "next"],
    "additionalProperties": False,
}


def _closed(**properties: Any) -> dict[str, Any]:
    """An object of exactly these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "string": _NAME,
    "integer": {"type": "integer", "minimum": -99, "maximum": 1234},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean or null": {"type": ["boolean", "null"]},
    "enum of all kinds": {"enum": ["red", 7, None, True, {"a": [1]}, "gr\u00fcn \U0001f642"]},
    "const": {"const": {"kind": "point", "at": [0, 0]}},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "object": _closed(name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}, "c": _NAME},
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["a", "b"]}],
        "items": False,
        "minItems": 2,
    },
    "nested": _closed(
        user=_closed(
            id={"type": "integer", "minimum": 1, "maximum": 9},
            tags={"type": "array", "items": _NAME, "maxItems": 2},
        )
    ),
    "anyOf": {"anyOf": [_closed(ok={"const": True}), _closed(error=_NAME)]},
    "tagged union": {
        "oneOf": [_closed(kind={"const": "cat"}, lives={"enum": [1, 9]}), _closed(kind={"const": "dog"})]
    },
    "reference": {
        "$defs": {"point": _closed(x={"enum": [0, 1]}, y={"enum": [0, 1]})},
        **_closed(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursion": _TREE,
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3, "maximum": 40}}, "additionalProperties": False},
        ]
    },
    "map": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
}


@cache
def tiny_compiler() -> GrammarCompiler:
    """For the tiny tokenizer; on its clock no time passes, so nothing ever takes too long."""
    return GrammarCompiler(text_tokenizer().pieces, VOCAB_SIZE, frozenset({EOS_ID}), lambda: 0.0)


def compiled(kind: Any, source: str = "", **further: Any) -> FollowableGrammar:
    """A grammar for the tiny tokenizer."""
    return tiny_compiler().compile(StructuredOutput(kind, source, **further))


def allowed(mask: TokenMask, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """The ids that a mask allows."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little", count=vocab_size)).tolist()
    return set(ids)
