"""Arguments in braces: told as JSON while they are written, and the same however they are split."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.text.reply.pieces import CallArguments, CallEnd, CallStart, CollectedReply, Piece
from engine.text.reply.text_feed import Stage
from engine.text.tools.braced_calls import FUNCTION_GEMMA, GEMMA4
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_spec import ToolRules, ToolSpec
from tests.support.examples import share_of

RULES = ToolRules([ToolSpec("write")])
MARKS = {"gemma4": (GEMMA4, '<|"|>'), "functiongemma": (FUNCTION_GEMMA, "<escape>")}
TEXTS = ("", "a", "\n", '"', "\\", "<", "<|", "}", "],", "call:write{", "é🦀", " ", "key: value")


def stage_of(form: ToolFormat) -> Stage:
    return Stage(lambda feed, tell: form.read(feed, CallTeller(RULES, tell)))


def told(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))


def collected(form: ToolFormat, parts: list[str], *, cut: bool = False) -> CollectedReply:
    stage = stage_of(form)
    pieces = [piece for part in parts for piece in stage.feed(part)]
    return CollectedReply.of(pieces + stage.finish(cut=cut))


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {f"k{number}": some_value(rng, depth + 1) for number in range(rng.randrange(3))}
    return "".join(rng.choices(TEXTS, k=2)) if kind < 2 else rng.choice((0, -1.5, 1e300, True, None))


def written(value: Any, quote: str, rng: random.Random) -> str:
    """The value as models write it: with more or less space, and texts in either kind of quotes."""
    space = rng.choice(("", "", " ", "\n"))
    if isinstance(value, str):
        return json.dumps(value) if rng.random() < 0.3 else quote + value + quote
    if isinstance(value, list):
        return "[" + f",{space}".join(written(each, quote, rng) for each in value) + f"{space}]"
    if isinstance(value, dict):
        pairs = (
            f"{rng.choice((key, json.dumps(key), quote + key + quote))}{space}:{written(each, quote, rng)}"
            for key, each in value.items()
        )
        return "{" + f"{space},".join(pairs) + "}"
    return json.dumps(value)


@pytest.mark.parametrize("name", MARKS)
def test_any_value_is_told_however_it_is_written_and_split(name: str) -> None:
    form, quote = MARKS[name]
    rng = random.Random(7)
    for _ in range(share_of(400)):
        value = {"a": some_value(rng), "b c": some_value(rng)}
        text = f"Hm. {form.openings[0]}call:write{written(value, quote, rng)}{form.marks[1]} Yes."
        at = sorted(rng.sample(range(len(text)), 3))
        several = [text[first:stop] for first, stop in zip([0, *at], [*at, len(text)], strict=True)]
        for parts in ([text], list(text), several):
            reply = collected(form, parts)
            (call,) = reply.calls
            assert (reply.content, call.is_whole) == ("Hm. Yes.", True), text
            assert json.loads(call.arguments) == value, text


def test_a_text_is_told_as_it_comes_up_to_what_may_be_its_quote() -> None:
    stage = stage_of(GEMMA4)
    assert stage.feed("<|tool_call>call:write") == []
    start, brace = stage.feed("{")
    assert isinstance(start, CallStart) and brace == CallArguments(0, "{")
    assert told(stage.feed('path:<|"|>a.py<|')) == '"path": "a.py'
    assert told(stage.feed("b")) == "<|b"
    assert told(stage.feed('\n"<|"|>,mo')) == r'\n\"", '
    assert told(stage.feed("de:tr")) == '"mode": '
    assert told(stage.feed("ue,note:[")) == 'true, "note": ['
    assert told(stage.feed('"c\\u00')) == '"c'
    assert told(stage.feed('e9"]')) == r'\u00e9"]'
    assert stage.feed("}") == [CallArguments(0, "}"), CallEnd(0)]
    assert stage.feed("<tool_call|>") == stage.finish(cut=False) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a:1 2:3}", '{"a": "1 2"'),
        ('{a:"\\x"}', '{"a": "'),
        ("{a:1,,}", '{"a": 1'),
        ("{" + "a:[" * 65, '{"a": ['),
        ("{a:[1}", '{"a": [1'),
        ("{[", "{"),
    ],
)
def test_what_is_no_value_breaks_the_call_off(text: str, expected: str) -> None:
    text = f"<|tool_call>call:write{text}<tool_call|>"
    for parts in ([text], list(text)):
        (call,) = collected(GEMMA4, parts).calls
        assert (call.arguments[: len(expected)], call.is_whole) == (expected, False)


def test_a_call_of_no_tool_is_content() -> None:
    for text in ('<|tool_call>call:rm{a:<|"|>b<|"|>}<tool_call|>', "<|tool_call> call me<tool_call|>"):
        for parts in ([text], list(text)):
            reply = collected(GEMMA4, parts)
            assert (reply.content, reply.calls) == (text, [])
