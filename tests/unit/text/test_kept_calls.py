"""Calls that a grammar holds from their opening on, in every format: whatever is drawn of them is valid."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from engine.text.grammar_text import grammar_text
from engine.text.reply.pieces import CallArguments, CollectedReply
from engine.text.reply.reply_format import ReplyFormat, Spelling
from engine.text.structured_output import StructuredOutput
from engine.text.tools.tool_formats import TOOL_FORMATS
from engine.text.tools.tool_spec import ToolChoice, ToolRules, ToolSpec
from tests.unit.text.builders import byte_compiler

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 99, "minimum": 0},
        "kind": {"enum": ["a", "b c"]},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
        "either": {"$ref": "#/$defs/part"},
    },
    "required": ["days", "code"],
    "$defs": {"part": {"anyOf": [{"type": "boolean"}, {"enum": ["x", "y"]}]}},
    "additionalProperties": False,
}
LARK = 'start: "add " N (" \\"}" | ";\\n")+\nN: /[0-9]{1,3}/\n'
WRITTEN = re.compile(r'add [0-9]{1,3}( "\}|;\n)+')
GO = ToolSpec("go", parameters=SCHEMA, is_strict=True)
FREE = ToolSpec("go2", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})
SQL = ToolSpec("sql", is_custom=True, form=StructuredOutput("grammar", LARK))
CODE = ToolSpec("code", is_custom=True, form=StructuredOutput("regex", "[a-c]{2}"))
# Spelled out at once now and then, for no walk over bytes finds them.
WORDS = ('"', "}", "]", ")", "\n", "</parameter>", "</arg_value>", "</seed:parameter>", "</function>", " ")


def format_of(name: str) -> ReplyFormat:
    spelling = Spelling([], lambda text: [ord(char) for char in text], {}, {})
    return ReplyFormat.find(None, None, spelling, tools=name)


class Walk:
    """A reply drawn from what its grammar allows, byte by byte."""

    def __init__(self, form: StructuredOutput, rng: random.Random) -> None:
        self.text = b""
        self.may_end = False
        self._state = byte_compiler().compile(form).start(frozenset((255,)))
        self._rng = rng

    def say(self, text: str) -> bool:
        """All of the text, if it is allowed."""
        return self._say(text.encode())

    def _say(self, data: bytes) -> bool:
        if self._state.num_valid(list(data)) < len(data):
            return False
        for byte in data:
            self.may_end = self._state.accept(byte)
        self.text += data
        return True

    def go_on(self, most: int) -> bool:
        """Up to where the reply may end; False where that is too far."""
        for _ in range(most):
            allowed = np.unpackbits(self._state.mask(()), bitorder="little")
            if allowed[255] or self.may_end:
                return True
            if self._rng.random() < 0.6 and any(
                self.say(word) for word in self._rng.sample(WORDS, len(WORDS))
            ):
                continue
            options = [byte for byte in range(0x20, 0x7F) if allowed[byte]] or np.flatnonzero(allowed)
            self._say(bytes([self._rng.choice(options)]))
        return False


def openings_of(kept: StructuredOutput) -> list[str]:
    if kept.calls is None:
        assert kept.frame is not None
        return [kept.frame.before.strip()]
    return [form.opening for form in kept.calls.forms if form.opening]


def check(reply: CollectedReply, text: str) -> set[str]:
    """The names of the calls, which are all valid."""
    assert reply.calls and reply.content.strip() in ("Hm.", ""), text
    for call in reply.calls:
        assert call.is_whole, text
        if call.name == "go":
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
        elif call.name == "sql":
            assert WRITTEN.fullmatch(call.arguments), text
        elif call.name == "code":
            assert re.fullmatch("[a-c]{2}", call.arguments), text
    return {call.name for call in reply.calls}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_called_amid_text_is_of_its_form(name: str) -> None:
    form, rng = format_of(name), random.Random(name)
    seen: set[str] = set()
    for tools in ([GO, FREE, SQL, CODE], [GO], [SQL], [CODE]):
        rules = ToolRules(tools)
        kept = form.kept(rules)
        assert kept is not None
        for _ in range(3):
            walk = Walk(kept, rng)
            opening = rng.choice(openings_of(kept))
            before = "<|channel|>commentary " if name == "gpt-oss" else "Hm. "
            assert walk.say(before) and walk.say(opening) and not walk.say("no tool")
            if walk.go_on(2000):
                text = walk.text.decode()
                seen |= check(form.reader([], rules).whole(text), text)
    assert {"go", "sql", "code"} <= seen


@pytest.mark.parametrize("begun", ["", '[{"name": "go", "arguments": ', '{"name": "go", "arguments": '])
@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("granite", "<|tool_call|>"),
        ("granite", "<tool_call>"),
        ("phi4-mini", "functools"),
        ("phi4-mini", "<|tool_call|>"),
    ],
)
def test_functions_are_held_behind_every_opening_that_a_call_is_read_behind(
    name: str, opening: str, begun: str
) -> None:
    form, rng, rules = format_of(name), random.Random(name), ToolRules([GO])
    kept = form.kept(rules)
    assert kept is not None
    walk = Walk(kept, rng)
    assert walk.say(f"Hm. {opening}") and walk.say(begun) and not walk.say("no tool")
    if walk.go_on(2000):
        text = walk.text.decode()
        check(form.reader([], rules).whole(text), text)


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"hermes", "mistral", "nemotron"}))
def test_the_grammar_of_many_functions_grows_as_their_number_does(name: str) -> None:
    def num_chars(number: int) -> int:
        tools = [replace(GO, name=f"go{index:03}") for index in range(number)]
        kept = format_of(name).kept(ToolRules(tools))
        assert kept is not None
        return len(grammar_text(kept, {}))

    assert num_chars(120) < 8 * num_chars(30)


@pytest.mark.parametrize(("name", "bare"), [("llama3", '{"name": "go", "parameters": '), ("llama4", "[go(")])
def test_a_reply_that_begins_with_a_call_is_held_without_an_opening(name: str, bare: str) -> None:
    form, rules = format_of(name), ToolRules([GO, SQL])
    kept = form.kept(rules)
    assert kept is not None
    for text in ("", "Yes.", '{"a": 1}', "[1, 2]", "We go(east)."):
        walk = Walk(kept, random.Random(name))
        assert walk.say(text) and walk.go_on(1), text
    walk = Walk(kept, random.Random(name))
    assert walk.say(bare) and not walk.say("no value") and walk.go_on(2000)
    text = walk.text.decode()
    assert check(form.reader([], rules).whole(text), text) == {"go"}


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"gpt-oss"}))
def test_a_forced_call_of_one_of_several_follows_its_grammar(name: str) -> None:
    form, rng = format_of(name), random.Random(name)
    rules = ToolRules([SQL, CODE], ToolChoice("required"))
    seen: set[str] = set()
    for _ in range(8):
        walk = Walk(form.forced(rules), rng)
        assert not walk.say("Hm.") and walk.go_on(2000)
        text = walk.text.decode()
        seen |= check(form.reader([], rules).whole(text), text)
    assert "sql" in seen


def test_the_input_comes_as_it_is_written() -> None:
    rules = ToolRules([SQL])
    reader = format_of("hermes").reader([], rules)
    text = '<tool_call>\n{"name": "sql", "arguments": {"input": "add 12 "};\n"}}\n</tool_call>'
    told = []
    for char in text:
        told += [piece.text for piece in reader.read(char) if isinstance(piece, CallArguments)]
        assert not "".join(told).endswith('"}')
    told += [piece.text for piece in reader.read("", ended=True) if isinstance(piece, CallArguments)]
    assert "".join(told) == 'add 12 "};\n'


@pytest.mark.parametrize("name", ["qwen3-coder", "llama4"])
def test_a_list_of_keys_that_is_none_is_an_error_of_nobody_s(name: str) -> None:
    tool = ToolSpec(
        "go", parameters={"type": "object", "properties": {"a": {}}, "required": 5}, is_strict=True
    )
    kept = format_of(name).kept(ToolRules([tool]))
    assert kept is not None and byte_compiler().compile(kept)


def test_other_tools_hold_nothing() -> None:
    assert format_of("qwen3-coder").kept(ToolRules([FREE])) is None
