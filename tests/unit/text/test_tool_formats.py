"""Calls found in replies: each format's marks, whatever the split, and what only looks like a call."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.text.reply.pieces import CallArguments, CallEnd, CallStart, CollectedReply, ContentText, Piece
from engine.text.reply.text_feed import Stage
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.json_formats import HERMES, LLAMA3, MISTRAL
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_formats import TOOL_FORMATS
from engine.text.tools.tool_spec import ToolRules, ToolSpec

RULES = ToolRules([ToolSpec("add"), ToolSpec("get_weather")])
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
    "no whole name": (HERMES, f"a <tool_call>{ADD[:12]}", (f"a <tool_call>{ADD[:12]}", [])),
    "no JSON": (HERMES, "<tool_call>{a: 1}</tool_call>", ("<tool_call>{a: 1}</tool_call>", [])),
    "no object": (HERMES, '<tool_call>["add"]</tool_call>', ('<tool_call>["add"]</tool_call>', [])),
    "wrong brackets": (HERMES, '<tool_call>{"name": [}]', ('<tool_call>{"name": [}]', [])),
    "not offered": (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}', ('<tool_call>{"name": "add"}', [])),
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
    "bare": (LLAMA3, f" \n{LLAMA_ADD}", ("", [ADDED])),
    "tagged": (LLAMA3, f"<|python_tag|>{LLAMA_ADD}", ("", [ADDED])),
    "tagged after text": (LLAMA3, f"Sure: <|python_tag|>{LLAMA_ADD}", ("Sure:", [ADDED])),
    "several bare": (LLAMA3, f"{LLAMA_ADD}; {LLAMA_ADD}", ("", [ADDED, ADDED])),
    "JSON that is no call": (LLAMA3, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    "bare after text": (LLAMA3, f"x {LLAMA_ADD}", (f"x {LLAMA_ADD}", [])),
    "code": (LLAMA3, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    "blank": (LLAMA3, " \n ", (" \n ", [])),
    "a list of one": (MISTRAL, f"[TOOL_CALLS][{ADD}]", ("", [ADDED])),
    "a list of two": (MISTRAL, f"[TOOL_CALLS] [ {ADD} , {WEATHER} ] ", ("", [ADDED, WEATHERED])),
    "text and a list": (MISTRAL, f"Hm. [TOOL_CALLS][{ADD}] ok", ("Hm. ok", [ADDED])),
    "no list": (MISTRAL, f"[TOOL_CALLS]{ADD}", ("", [ADDED])),
    "a list in other marks": (HERMES, f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", ("", [ADDED, WEATHERED])),
    "an empty list": (MISTRAL, "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
    "a bad second": (MISTRAL, f"[TOOL_CALLS][{ADD}, x]", (", x]", [ADDED])),
    "two marks": (MISTRAL, f"[TOOL[TOOL_CALLS][{ADD}]", ("[TOOL", [ADDED])),
}


def stage_of(form: ToolFormat, rules: ToolRules = RULES) -> Stage:
    return Stage(lambda feed, tell: form.read(feed, CallTeller(rules, tell)))


def read(stage: Stage, parts: Sequence[str], *, cut: bool = False) -> list[Piece]:
    return [piece for part in parts for piece in stage.feed(part)] + stage.finish(cut=cut)


def found_in(pieces: Sequence[Piece]) -> Found:
    reply = CollectedReply.of(pieces)
    assert len({call.id for call in reply.calls}) == len(reply.calls)
    return reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]


def splits(text: str) -> list[list[str]]:
    """Whole, in characters, in two at every place, and at random."""
    rng = random.Random(3)
    halves = [[text[:i], text[i:]] for i in range(1, len(text))]
    cuts = [sorted(rng.sample(range(len(text) + 1), min(5, len(text)))) for _ in range(40)]
    several = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    return [[text], list(text), *halves, *several]


@pytest.mark.parametrize("case", CASES)
def test_the_reply_is_the_same_however_it_is_split(case: str) -> None:
    form, text, expected = CASES[case]
    for parts in splits(text):
        assert found_in(read(stage_of(form), parts)) == expected


def test_content_is_not_kept_back_longer_than_it_must_be() -> None:
    stage = stage_of(HERMES)
    assert stage.feed("Hello <b") == [ContentText("Hello <b")]
    assert stage.feed(" x <to") == [ContentText(" x")]
    assert stage.feed("n>") == [ContentText(" <ton>")]


def test_arguments_come_as_they_are_written() -> None:
    stage = stage_of(HERMES)
    assert stage.feed('<tool_call>{"name": "add", "arguments": ') == []
    start, brace = stage.feed("{")
    assert isinstance(start, CallStart) and (start.index, start.name) == (0, "add")
    assert start.id.startswith("call_")
    assert brace == CallArguments(0, "{")
    assert stage.feed('"a"') == [CallArguments(0, '"a"')]
    assert stage.feed(": 1}") == [CallArguments(0, ": 1}")]
    assert stage.feed("}</tool_call>") == [CallEnd(0)]
    assert stage.finish(cut=False) == []


def test_more_calls_than_allowed_are_left_out() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>"
    one = ToolRules(RULES.tools, is_parallel=False)
    assert found_in(read(stage_of(HERMES, one), [text])) == ("", [ADDED])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_nothing_a_model_writes_raises_or_depends_on_its_split(name: str) -> None:
    rng = random.Random(11)
    form = TOOL_FORMATS[name]
    alphabet = [*form.marks, *'{}[]",:; \\\nab', ADD, '"name"', form.openings[0][:5], "add", "</"]
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 12)))
        for cut in (False, True):
            whole = CollectedReply.of(read(stage_of(form), [text], cut=cut))
            split = CollectedReply.of(read(stage_of(form), list(text), cut=cut))
            assert (split.content, _arguments(split)) == (whole.content, _arguments(whole)), text


def _arguments(reply: CollectedReply) -> list[tuple[str, str, bool]]:
    return [(call.name, call.arguments, call.is_whole) for call in reply.calls]


# A whole reply in each format; cut anywhere, nothing of its marks may be told.
WHOLE: dict[str, str] = {
    "hermes": f"Hm. <tool_call>\n{ADD}\n</tool_call>\n<tool_call>{WEATHER}</tool_call>",
    "llama3": f"<|python_tag|>{LLAMA_ADD}; {LLAMA_ADD}",
    "mistral": f"Hm.[TOOL_CALLS][{ADD}, {WEATHER}]",
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_cut_reply_leaks_nothing_of_its_marks(name: str) -> None:
    form, text = TOOL_FORMATS[name], WHOLE[name]
    whole = CollectedReply.of(read(stage_of(form), [text]))
    for size in range(len(text)):
        reply = CollectedReply.of(read(stage_of(form), [text[:size]], cut=True))
        assert whole.content.startswith(reply.content.rstrip())
        assert len(reply.calls) <= len(whole.calls)
        for found, full in zip(reply.calls, whole.calls, strict=False):
            assert found.name == full.name and full.arguments.startswith(found.arguments)
        assert all(call.is_whole for call in reply.calls[:-1])
