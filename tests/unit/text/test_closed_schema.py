"""closed_schema: which objects get no further keys, and which have to stay as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.text.closed_schema import closed_schema
from engine.text.structured_output import StructuredOutput
from tests.unit.text.builders import byte_compiler

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}
KEY_A: dict[str, Any] = {"properties": {"a": {"minimum": 0}}, "required": ["a"]}
KEY_B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^b": {}}}, {**A, "patternProperties": {"^b": {}}}),
        ({"type": "object"}, {"type": "object"}),  # a map: no key is named at all
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"allOf": [A]}, {"allOf": [CLOSED]}),
        ({"allOf": [A, {"properties": {"b": {}}}]}, {"allOf": [A, {"properties": {"b": {}}}]}),
        (
            {"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {}}}]},
            {"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {}}}]},
        ),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
        ({"const": A}, {"const": A}),
        ({**A, "anyOf": [{"required": ["a"]}]}, {**CLOSED, "anyOf": [{"required": ["a"]}]}),
        ({**A, "oneOf": [KEY_A, KEY_A]}, {**CLOSED, "oneOf": [KEY_A, KEY_A]}),
        ({**A, "anyOf": [KEY_A, KEY_B]}, {**A, "anyOf": [KEY_A, KEY_B]}),
        (
            {"$defs": {"x": KEY_B}, **A, "anyOf": [{"$ref": "#/$defs/x"}, KEY_A]},
            {"$defs": {"x": KEY_B}, **A, "anyOf": [{"$ref": "#/$defs/x"}, KEY_A]},
        ),
    ],
)
def test_objects_that_name_keys_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert closed_schema(schema) == expected
    assert json.dumps(schema) == before


def test_alternatives_that_name_further_keys_can_be_written() -> None:
    """Closed to each other's keys, they left nothing that satisfies them."""
    form = StructuredOutput("json_schema", json.dumps(closed_schema({**A, "anyOf": [KEY_A, KEY_B]})))
    text = b'{"a": 1, "b": 2}'
    assert byte_compiler().compile(form).start(frozenset()).num_valid(list(text)) == len(text)


def longest(schema: dict[str, Any], before: bytes, char: str) -> int:
    """How often a character may be written behind `before`."""
    state = byte_compiler().compile(StructuredOutput("json_schema", json.dumps(schema))).start(frozenset())
    for byte in before:
        state.accept(byte)
    count = 0
    while count < 100 and state.mask(())[ord(char) >> 3] >> (ord(char) & 7) & 1:
        state.accept(ord(char))
        count += 1
    return count


def test_a_closed_object_ends_and_whitespace_does_not_go_on() -> None:
    one = {**A, "required": ["a"]}
    assert longest(one, b'{"a":1', ",") == 1
    assert longest(closed_schema(one), b'{"a":1', ",") == 0
    for before in (b"{", b'{"a"', b'{"a":', b'{"a":1'):
        assert [longest(one, before, char) for char in " \t\n"] == [4, 4, 1]
        assert longest(one, before + b"\n", " ") == 32
