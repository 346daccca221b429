"""Calls as `call:NAME{key:value,...}` with quotes that are tokens of their own: gemma 4, functiongemma."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

from engine.text.reply.text_feed import Parser, TextFeed, text_until
from engine.text.structured_output import CallForm, CallForms, CallPart
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.json_formats import HERMES
from engine.text.tools.kept_calls import grammar_of, json_value
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_spec import INPUT_KEY, ToolSpec

_HEAD = re.compile(r"\A\s*call:([\w.\-]+)\s*")
_BARE = re.compile(r"[^,\[\]{}:]*")
_MAX_CHARS = 65_536
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Braces:
    """How calls stand in text: `opening`, the call, `closing`; a text in it stands between two `quote`s."""

    opening: str
    closing: str
    quote: str


def read_braced_calls(braces: Braces, feed: TextFeed, teller: CallTeller) -> Parser:
    """Parse a reply's content. A call is told when its closing mark has come."""
    while True:
        mark = yield from teller.copy_until(feed, (braces.opening,))
        if mark is None:
            return
        before = feed.space + mark
        found = yield from text_until(feed, (braces.closing,), _MAX_CHARS)
        if found is None:
            if feed.ended and feed.cut:
                feed.text = ""
            else:
                teller.content(before)
            continue
        call = call_in(found[0], braces.quote)
        if call is None or not teller.knows(call[0]):
            teller.content(before + found[0] + found[1])
            continue
        teller.call(*call)


def kept_braced(braces: Braces, tools: Sequence[ToolSpec]) -> CallForms:
    """The calls as grammars hold them: arguments as JSON, which is read as well."""
    forms = []
    for tool in tools:
        grammar = grammar_of(tool)
        if grammar is None:
            parts: tuple[CallPart, ...] = (f"call:{tool.name}", json_value(tool.schema), braces.closing)
        else:
            head, tail = f"call:{tool.name}{{{INPUT_KEY}:{braces.quote}", f"{braces.quote}}}{braces.closing}"
            parts = (head, grammar, tail)
        forms.append(CallForm(braces.opening, parts))
    return CallForms(tuple(forms))


def call_in(text: str, quote: str) -> tuple[str, str] | None:
    """The name and the arguments, as JSON, of a call; None if the text is none."""
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        value, at = _value(text, head.end(), quote, 0)
    except (ValueError, IndexError):
        return None
    if not isinstance(value, dict) or text[at:].strip():
        return None
    return head[1], json.dumps(value, ensure_ascii=False, allow_nan=False)


def _value(text: str, at: int, quote: str, depth: int) -> tuple[object, int]:
    """The value at a place, and where it ends. Raises ValueError or IndexError for none."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    at = _skip(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at] == '"':
        found, size = json.JSONDecoder().raw_decode(text[at:])
        return found, at + size
    if text[at] == "[":
        return _items(text, at + 1, quote, depth)
    if text[at] == "{":
        return _pairs(text, at + 1, quote, depth)
    bare = _BARE.match(text, at)
    word = "" if bare is None else bare[0]
    try:
        value = json.loads(word)
    except ValueError:
        value = word.strip()
    if isinstance(value, float) and not isfinite(value):  # JSON has no number for it
        value = word.strip()
    return value, at + len(word)


def _items(text: str, at: int, quote: str, depth: int) -> tuple[list[object], int]:
    found: list[object] = []
    while text[at := _skip(text, at)] != "]":
        value, at = _value(text, at, quote, depth + 1)
        found.append(value)
        at = _next(text, at, "]")
    return found, at + 1


def _pairs(text: str, at: int, quote: str, depth: int) -> tuple[dict[str, object], int]:
    found: dict[str, object] = {}
    while text[at := _skip(text, at)] != "}":
        key, at = _value(text, at, quote, depth + 1)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError("no value")
        found[str(key)], at = _value(text, at + 1, quote, depth + 1)
        at = _next(text, at, "}")
    return found, at + 1


def _next(text: str, at: int, end: str) -> int:
    """Behind a comma, or at the end of a list."""
    at = _skip(text, at)
    if text[at] == ",":
        return at + 1
    if text[at] != end:
        raise ValueError("no comma")
    return at


def _skip(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _format(braces: Braces) -> ToolFormat:
    return ToolFormat(
        signs=((braces.opening,),),
        openings=(braces.opening,),
        marks=(braces.opening, braces.closing, braces.quote),
        read=partial(read_braced_calls, braces),
        forced_as=HERMES,
        kept=partial(kept_braced, braces),
    )


GEMMA4 = _format(Braces("<|tool_call>", "<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = _format(Braces("<start_function_call>", "<end_function_call>", "<escape>"))
