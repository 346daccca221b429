"""Calls found in replies: the marks of each family, whatever the split, and what only looks like a call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from server.api.tools.forced import ForcedReader
from server.api.tools.hermes import HERMES
from server.api.tools.llama import LLAMA
from server.api.tools.marked import MarkedReader
from server.api.tools.message import join_pieces
from server.api.tools.mistral import MISTRAL
from server.api.tools.pieces import CallArguments, CallReader, CallStart, ContentText, Piece

NAMES = {"add", "get_weather"}
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"]"}]}}'
WEATHER = '{"name": "get_weather", "arguments": {"city": "Köln 🦀", "note": "</tool_call>[TOOL_CALLS];"}}'
LLAMA_ADD = ADD.replace("arguments", "parameters")

Found = tuple[str, list[tuple[str, Any]]]
ADDED = ("add", {"a": 1, "b": [2, {"c": '}"]'}]})
WEATHERED = ("get_weather", {"city": "Köln 🦀", "note": "</tool_call>[TOOL_CALLS];"})

CASES: dict[str, tuple[Any, str, Found]] = {
    "one call": (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", ("", [ADDED])),
    "two calls": (
        HERMES,
        f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
        ("", [ADDED, WEATHERED]),
    ),
    "text before": (HERMES, f"Let me see.\n\n<tool_call>{ADD}</tool_call>", ("Let me see.", [ADDED])),
    "text around": (HERMES, f"a <tool_call>{ADD}</tool_call> b", ("a b", [ADDED])),
    "no closing mark": (HERMES, f"<tool_call>{ADD}", ("", [ADDED])),
    "no call": (HERMES, "a <b> <tool_ <tool call> {x}\n", ("a <b> <tool_ <tool call> {x}\n", [])),
    "mark at the end": (HERMES, "a <tool_call>", ("a <tool_call>", [])),
    "cut": (HERMES, f"a <tool_call>{ADD[:30]}", (f"a <tool_call>{ADD[:30]}", [])),
    "no JSON": (HERMES, "<tool_call>{a: 1}</tool_call>", ("<tool_call>{a: 1}</tool_call>", [])),
    "no object": (HERMES, '<tool_call>["add"]</tool_call>', ('<tool_call>["add"]</tool_call>', [])),
    "wrong brackets": (HERMES, '<tool_call>{"name": [}]', ('<tool_call>{"name": [}]', [])),
    "not offered": (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}', ('<tool_call>{"name": "add"}', [])),
    "not a number": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}',
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}', []),
    ),
    "too large a number": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}',
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}', []),
    ),
    "a name that is no string": (
        HERMES,
        '<tool_call>{"name": {}, "arguments": {}}',
        ('<tool_call>{"name": {}, "arguments": {}}', []),
    ),
    "too deep": (
        HERMES,
        "<tool_call>{" + '"a":[' * 200,
        ("<tool_call>{" + '"a":[' * 200, []),
    ),
    "a bad one, then a good one": (
        HERMES,
        f"<tool_call>oops <tool_call>{ADD}</tool_call>",
        ("<tool_call>oops", [ADDED]),
    ),
    "quoted arguments": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
        ("", [("add", {"a": 2})]),
    ),
    "bare": (LLAMA, f" \n{LLAMA_ADD}", ("", [ADDED])),
    "tagged": (LLAMA, f"<|python_tag|>{LLAMA_ADD}", ("", [ADDED])),
    "tagged after text": (LLAMA, f"Sure: <|python_tag|>{LLAMA_ADD}", ("Sure:", [ADDED])),
    "several bare": (LLAMA, f"{LLAMA_ADD}; {LLAMA_ADD}", ("", [ADDED, ADDED])),
    "JSON that is no call": (LLAMA, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    "bare after text": (LLAMA, f"x {LLAMA_ADD}", (f"x {LLAMA_ADD}", [])),
    "code": (LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    "blank": (LLAMA, " \n ", (" \n ", [])),
    "a list of one": (MISTRAL, f"[TOOL_CALLS][{ADD}]", ("", [ADDED])),
    "a list of two": (MISTRAL, f"[TOOL_CALLS] [ {ADD} , {WEATHER} ] ", ("", [ADDED, WEATHERED])),
    "text and a list": (MISTRAL, f"Hm. [TOOL_CALLS][{ADD}] ok", ("Hm. ok", [ADDED])),
    "no list": (MISTRAL, f"[TOOL_CALLS]{ADD}", (f"[TOOL_CALLS]{ADD}", [])),
    "an empty list": (MISTRAL, "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
    "a bad second": (MISTRAL, f"[TOOL_CALLS][{ADD}, x]", (", x]", [ADDED])),
    "two marks": (MISTRAL, f"[TOOL[TOOL_CALLS][{ADD}]", ("[TOOL", [ADDED])),
}


def read(reader: CallReader, parts: Sequence[str]) -> list[Piece]:
    return [piece for part in parts for piece in reader.feed(part)] + list(reader.finish())


def found_in(pieces: Sequence[Piece]) -> Found:
    content, calls = join_pieces(pieces)
    assert len({call["id"] for call in calls}) == len(calls)
    return content, [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]


def splits(text: str) -> list[list[str]]:
    """Whole, in characters, in two at every place, and at random."""
    rng = random.Random(3)
    halves = [[text[:i], text[i:]] for i in range(1, len(text))]
    cuts = [sorted(rng.sample(range(len(text) + 1), min(5, len(text)))) for _ in range(40)]
    several = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    return [[text], list(text), *halves, *several]


@pytest.mark.parametrize("case", CASES)
def test_the_reply_is_the_same_however_it_is_split(case: str) -> None:
    family, text, expected = CASES[case]
    for parts in splits(text):
        assert found_in(read(MarkedReader(family.marks, NAMES, 99), parts)) == expected


def test_content_is_not_kept_back_longer_than_it_must_be() -> None:
    reader = MarkedReader(HERMES.marks, NAMES, 99)
    assert reader.feed("Hello <b") == [ContentText("Hello <b")]
    assert reader.feed(" x <to") == [ContentText(" x")]
    assert reader.feed("n>") == [ContentText(" <ton>")]


def test_a_call_comes_as_its_name_and_then_its_arguments() -> None:
    reader = MarkedReader(HERMES.marks, NAMES, 99)
    assert reader.feed(f"<tool_call>{ADD[:-1]}") == []
    start, arguments = reader.feed("}")
    assert isinstance(start, CallStart) and (start.index, start.name) == (0, "add")
    assert start.id.startswith("call_")
    assert isinstance(arguments, CallArguments) and arguments.index == 0


def test_more_calls_than_allowed_are_left_out() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>"
    assert found_in(read(MarkedReader(HERMES.marks, NAMES, 1), [text])) == ("", [ADDED])


@pytest.mark.parametrize("family", [HERMES, LLAMA, MISTRAL], ids=lambda family: family.name)
def test_nothing_a_model_writes_raises_or_is_lost(family: Any) -> None:
    rng = random.Random(11)
    alphabet = [family.marks.opening, family.marks.closing, *'{}[]",:; \\\nab', ADD, '"name"', "[TOOL_"]
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 12)))
        whole = found_in(read(MarkedReader(family.marks, NAMES, 99), [text]))
        assert found_in(read(MarkedReader(family.marks, NAMES, 99), list(text))) == whole
        if not whole[1]:
            assert whole[0] == text


FORCED: dict[str, Callable[[str], str]] = {
    "hermes": lambda call: f"<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>",
    "mistral": lambda call: f"[{call}, {call}]",
}


@pytest.mark.parametrize("family", FORCED)
def test_a_forced_reply_is_read_whatever_its_split(family: str) -> None:
    text = FORCED[family](WEATHER)
    for parts in splits(text):
        assert found_in(read(ForcedReader(), parts)) == ("", [WEATHERED, WEATHERED])


def test_forced_arguments_come_as_they_are_written() -> None:
    reader = ForcedReader()
    assert reader.feed('{"name": "add", "parameters": ') == []
    start, brace = reader.feed("{")
    assert brace == CallArguments(0, "{")
    assert isinstance(start, CallStart) and start.name == "add"
    assert reader.feed('"a"') == [CallArguments(0, '"a"')]
    assert reader.feed(": 1}}") == [CallArguments(0, ": 1}")]
    assert reader.finish() == []


def test_a_forced_reply_that_is_cut_keeps_what_there_is() -> None:
    head = '<tool_call>\n{"name": "ad'
    assert read(ForcedReader(), [head]) == [ContentText(head)]
    start, *arguments = read(ForcedReader(), ['{"name": "add", "arguments": {"a": "xy'])
    assert isinstance(start, CallStart)
    assert arguments == [CallArguments(0, '{"a": "xy')]
