"""Calls found in replies: each format's marks, whatever the split, and what only looks like a call."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.text.reply.pieces import CallArguments, CallEnd, CallStart, CollectedReply, ContentText, Piece
from engine.text.reply.text_feed import Stage
from engine.text.tools.braced_calls import FUNCTION_GEMMA, GEMMA4
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.channel_calls import CHANNELS
from engine.text.tools.headed_formats import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL_NAMED
from engine.text.tools.json_formats import GRANITE, HERMES, LLAMA3, MISTRAL, PHI4_MINI
from engine.text.tools.python_formats import GEMMA3, LFM2, LLAMA4
from engine.text.tools.tagged_calls import argument_of
from engine.text.tools.tagged_formats import GLM45, MINIMAX, QWEN3_CODER
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_formats import TOOL_FORMATS
from engine.text.tools.tool_spec import ToolRules, ToolSpec
from tests.support.examples import share_of

TEXT = {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
RULES = ToolRules([ToolSpec("add", parameters=NUMBERS), ToolSpec("get_weather", parameters=TEXT)])
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"]"}]}}'
WEATHER = '{"name": "get_weather", "arguments": {"city": "Köln 🦀", "note": "</tool_call>[TOOL_CALLS];"}}'
LLAMA_ADD = ADD.replace("arguments", "parameters")

Found = tuple[str, list[tuple[str, Any]]]
ADDED = ("add", {"a": 1, "b": [2, {"c": '}"]'}]})
WEATHERED = ("get_weather", {"city": "Köln 🦀", "note": "</tool_call>[TOOL_CALLS];"})

ADD_ARGS, WEATHER_ARGS = (json.dumps(arguments, ensure_ascii=False) for _, arguments in (ADDED, WEATHERED))
QWEN_ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    '<parameter=b>\n[2, {"c": "}\\"]"}]\n</parameter>\n</function>\n</tool_call>'
)
QWEN_WEATHER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln 🦀\n</parameter>\n"
    "<parameter=note>\n</tool_call>[TOOL_CALLS];\n</parameter>\n</function>\n</tool_call>"
)
GLM_ADD = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    '<arg_key>b</arg_key>\n<arg_value>[2, {"c": "}\\"]"}]</arg_value>\n</tool_call>'
)
GLM_WEATHER = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln 🦀</arg_value>\n"
    "<arg_key>note</arg_key>\n<arg_value></tool_call>[TOOL_CALLS];</arg_value>\n</tool_call>"
)
MINIMAX_BOTH = (
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">[2, {"c": "}\\"]"}]</parameter>\n</invoke>\n<invoke name="get_weather">\n'
    '<parameter name="city">Köln 🦀</parameter>\n'
    '<parameter name="note"></tool_call>[TOOL_CALLS];</parameter>\n</invoke>\n</minimax:tool_call>'
)
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_BOTH = (
    _CALLS
    + "\n".join(
        f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_END}"
        for name, arguments in (("add", ADD_ARGS), ("get_weather", WEATHER_ARGS))
    )
    + _CALLS_END
)
DEEPSEEK31_BOTH = (
    f"{_CALLS}{_CALL}add{_SEP}{ADD_ARGS}{_END}{_CALL}get_weather{_SEP}{WEATHER_ARGS}{_END}{_CALLS_END}"
)
_ARGS = "<|tool_call_argument_begin|>"
KIMI_BOTH = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0{_ARGS}{ADD_ARGS}<|tool_call_end|>"
    f"<|tool_call_begin|>functions.get_weather:1{_ARGS}{WEATHER_ARGS}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
PY_ADD = "add(a=1, b=[2, {'c': '}\"]'}])"
PY_WEATHER = 'get_weather(city="Köln 🦀", note="</tool_call>[TOOL_CALLS];")'

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
    "granite": (GRANITE, f"<|tool_call|>[{ADD}]", ("", [ADDED])),
    "granite in tags": (GRANITE, f"Hm.\n<tool_call>{ADD}", ("Hm.", [ADDED])),
    "phi": (PHI4_MINI, f"functools[{ADD}, {WEATHER}]", ("", [ADDED, WEATHERED])),
    "phi with words": (PHI4_MINI, "use functools.partial", ("use functools.partial", [])),
    "qwen3-coder": (QWEN3_CODER, f"Hm.\n\n{QWEN_ADD}\n{QWEN_WEATHER}", ("Hm.", [ADDED, WEATHERED])),
    "qwen3-coder without its section": (
        QWEN3_CODER,
        QWEN_ADD.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"),
        ("", [ADDED]),
    ),
    "qwen3-coder without arguments": (
        QWEN3_CODER,
        "<tool_call><function=add></function></tool_call> ok",
        (" ok", [("add", {})]),
    ),
    "qwen3-coder and an unknown function": (
        QWEN3_CODER,
        "<tool_call>\n<function=rm>\n</function>",
        ("<tool_call>\n<function=rm>\n</function>", []),
    ),
    "qwen3-coder and no function": (QWEN3_CODER, "<tool_call> no", ("<tool_call> no", [])),
    "glm": (GLM45, f"Hm.\n{GLM_ADD}\n{GLM_WEATHER}", ("Hm.", [ADDED, WEATHERED])),
    "glm in one line": (
        GLM45,
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        ("", [("add", {"a": 1})]),
    ),
    "glm without arguments": (GLM45, "<tool_call>add</tool_call>", ("", [("add", {})])),
    "glm and an unknown function": (GLM45, "<tool_call>rm\n", ("<tool_call>rm\n", [])),
    "minimax": (MINIMAX, f"{MINIMAX_BOTH}\nok", ("\nok", [ADDED, WEATHERED])),
    "deepseek v3": (DEEPSEEK_V3, f"Hm.{DEEPSEEK_BOTH}", ("Hm.", [ADDED, WEATHERED])),
    "deepseek v3.1": (DEEPSEEK_V31, f"Hm. {DEEPSEEK31_BOTH}", ("Hm.", [ADDED, WEATHERED])),
    "kimi": (KIMI_K2, f"Hm. {KIMI_BOTH}", ("Hm.", [ADDED, WEATHERED])),
    "kimi and an unknown function": (
        KIMI_K2,
        "<|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ("<|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}", []),
    ),
    "mistral by name": (
        MISTRAL_NAMED,
        f"[TOOL_CALLS]add[ARGS]{ADD_ARGS}[TOOL_CALLS]get_weather{WEATHER_ARGS}",
        ("", [ADDED, WEATHERED]),
    ),
    "gemma 4": (
        GEMMA4,
        'Hm. <|tool_call>call:add{a:1,b:[2,{c:<|"|>}"]<|"|>}]}<tool_call|><|tool_call>'
        'call:get_weather{city:<|"|>Köln 🦀<|"|>,note:<|"|></tool_call>[TOOL_CALLS];<|"|>}<tool_call|>',
        ("Hm.", [ADDED, WEATHERED]),
    ),
    "gemma 4 with words": (
        GEMMA4,
        "<|tool_call>call:add{a:true,b:[]}<tool_call|>",
        ("", [("add", {"a": True, "b": []})]),
    ),
    "gemma 4 with numbers that JSON has not": (
        GEMMA4,
        "<|tool_call>call:add{a:Infinity,b:[-Infinity,NaN,1e999]}<tool_call|>",
        ("", [("add", {"a": "Infinity", "b": ["-Infinity", "NaN", "1e999"]})]),
    ),
    "gemma 4 and no call": (GEMMA4, "<|tool_call>add(1)<tool_call|>", ("<|tool_call>add(1)<tool_call|>", [])),
    "functiongemma": (
        FUNCTION_GEMMA,
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
        ("", [("get_weather", {"city": "Rome"})]),
    ),
    "lfm2": (
        LFM2,
        f"<|tool_call_start|>[{PY_ADD}, {PY_WEATHER}]<|tool_call_end|>ok",
        ("ok", [ADDED, WEATHERED]),
    ),
    "lfm2 with JSON": (LFM2, f"Hm. <|tool_call_start|>[{ADD}]<|tool_call_end|>", ("Hm.", [ADDED])),
    "lfm2 and no call": (LFM2, "<|tool_call_start|>[add(1)]", ("<|tool_call_start|>[add(1)]", [])),
    "llama 4": (LLAMA4, f"[{PY_ADD}, {PY_WEATHER}]", ("", [ADDED, WEATHERED])),
    "llama 4 in marks": (LLAMA4, f"<|python_start|>[{PY_ADD}]<|python_end|>", ("", [ADDED])),
    "llama 4 and JSON in marks": (LLAMA4, f"<|python_start|>{LLAMA_ADD}<|python_end|>", ("", [ADDED])),
    "llama 4 and a list": (LLAMA4, "[1, 2] is a list", ("[1, 2] is a list", [])),
    "gemma 3": (GEMMA3, f"Hm.\n```tool_code\n{PY_ADD}\n```", ("Hm.", [ADDED])),
    "gemma 3 with code": (GEMMA3, "```tool_code\nprint(1)\n```", ("```tool_code\nprint(1)\n```", [])),
    "channels": (
        CHANNELS,
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD_ARGS}<|call|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER_ARGS}",
        ("", [ADDED, WEATHERED]),
    ),
    "channels with a preamble": (
        CHANNELS,
        "<|channel|>commentary<|message|>Hm. <|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ("Hm. Yes.", []),
    ),
    "channels and an unknown function": (
        CHANNELS,
        "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        ("{}", []),
    ),
    "no channel": (CHANNELS, "Yes.", ("Yes.", [])),
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


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, "b": ]}</tool_call>'),
        (LLAMA3, f'{{"name": "add", "parameters": {{"a": [1, "b"}}}}; {LLAMA_ADD}'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "add", "arguments": {{"a": {{1]}}}}, {WEATHER}]'),
        (KIMI_K2, f"<|tool_call_begin|>functions.add:0{_ARGS}{{]}}<|tool_call_end|>{KIMI_BOTH}"),
        (CHANNELS, '<|channel|>commentary to=functions.add<|message|>{"a": "x"]}<|call|>'),
        (LLAMA4, f"add(b={'[' * 129}{']' * 129})"),
        (LLAMA4, f"add(b='{'x' * 65_536}')"),
    ],
)
def test_arguments_that_break_off_end_at_the_same_place_however_they_are_split(
    form: ToolFormat, text: str
) -> None:
    whole = CollectedReply.of(read(stage_of(form), [text]))
    for parts in (list(text), [text[:-9], text[-9:]], [text[:50], text[50:]]):
        split = CollectedReply.of(read(stage_of(form), parts))
        assert (split.content, _arguments(split)) == (whole.content, _arguments(whole))


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, '"a"', "a"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, '["a"]', ["a"]),
        ({"enum": ["1", "2", None]}, "1", "1"),
        ({"enum": [1, 2, None]}, "1", 1),
        ({"const": "5"}, "5", "5"),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "[1]", [1]),
        ({"type": None, "anyOf": [True]}, "5", 5),
        ({}, "5", 5),
    ],
)
def test_an_argument_between_tags_is_what_its_schema_takes(
    schema: dict[str, Any], text: str, expected: object
) -> None:
    assert json.loads(argument_of(f"\n{text}\n", schema)) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "add"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "say", "arguments": {"input": "\\ud83d"}}</tool_call>'),
        (GEMMA4, '<|tool_call>call:add{a:"\\ud83d"}<tool_call|>'),
        (LFM2, '<|tool_call_start|>[add(a="\\ud83d")]<|tool_call_end|>'),
    ],
)
def test_half_of_a_surrogate_pair_is_no_text(form: ToolFormat, text: str) -> None:
    rules = ToolRules([*RULES.tools, ToolSpec("say", is_custom=True)])
    for parts in ([text], list(text)):
        (call,) = CollectedReply.of(read(stage_of(form, rules), parts)).calls
        assert call.is_whole and call.arguments.encode()


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
    for _ in range(share_of(1500, 8)):
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
    "granite": f"Hm. <|tool_call|>[{ADD}, {WEATHER}]",
    "phi4-mini": f"functools[{ADD}, {WEATHER}]",
    "qwen3-coder": f"Hm.\n{QWEN_ADD}\n{QWEN_WEATHER}",
    "seed-oss": f"Hm.\n{QWEN_ADD}".replace("tool_call>", "seed:tool_call>"),
    "nemotron": f"Hm.<TOOLCALL>[{ADD}, {WEATHER}]</TOOLCALL>",
    "glm45": f"Hm.\n{GLM_ADD}\n{GLM_WEATHER}",
    "minimax-m2": f"Hm.\n{MINIMAX_BOTH}",
    "deepseek-v3": f"Hm. {DEEPSEEK_BOTH}",
    "deepseek-v31": f"Hm. {DEEPSEEK31_BOTH}",
    "kimi-k2": f"Hm. {KIMI_BOTH}",
    "mistral-named": f"Hm. [TOOL_CALLS]add[ARGS]{ADD_ARGS}[TOOL_CALLS]get_weather[ARGS]{WEATHER_ARGS}",
    "gemma4": 'Hm. <|tool_call>call:get_weather{city:<|"|>Köln 🦀<|"|>}<tool_call|>',
    "functiongemma": "Hm. <start_function_call>call:add{a:1}<end_function_call>",
    "lfm2": f"Hm. <|tool_call_start|>[{PY_ADD}, {PY_WEATHER}]<|tool_call_end|>",
    "llama4": f"<|python_start|>[{PY_ADD}]<|python_end|>",
    "gemma3": f"Hm. ```tool_code\n{PY_ADD}\n```",
    "gpt-oss": f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD_ARGS}<|call|>",
}


def test_every_format_is_cut_somewhere() -> None:
    assert set(WHOLE) == set(TOOL_FORMATS)


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
