"""Calls as JSON objects of a name and arguments, between marks: hermes, llama 3, mistral, granite, phi-4."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.text.reply.text_feed import Parser, TextFeed
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.json_end import JsonEnd
from engine.text.tools.kept_calls import RAW_HEAD, RAW_TAIL

_ARGUMENT_KEYS = ("arguments", "parameters")
# Looked for again with every token until it is there, so it is short: other objects are read at their end.
_SPACE = r"\s{0,64}"
_HEAD = re.compile(
    rf'\A\{{{_SPACE}"name"{_SPACE}:{_SPACE}"([^"\\]{{0,256}})"{_SPACE},'
    rf'{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
_RAW_HEAD = re.compile(re.escape(RAW_HEAD))
_BETWEEN = (",", ";")


@dataclass(frozen=True, slots=True)
class JsonMarks:
    """How calls stand in text: one of `openings`, objects or a list of them, then one of `closings`, if any.

    Any whitespace may stand around each. `bare` calls need no opening where the reply begins.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    bare: bool = False


def read_json_calls(marks: JsonMarks, feed: TextFeed, teller: CallTeller) -> Parser:
    """Parse a reply's content. Arguments are told as they come, once the tool is known.

    Whitespace next to a call belongs to the format, and is no content.
    """
    if marks.bare:
        space = yield from feed.skip_space()
        if feed.text[:1] in ("{", "["):
            yield from _read_group(marks, space, feed, teller)
        else:
            feed.text = space + feed.text
    while True:
        mark = yield from teller.copy_until(feed, marks.openings)
        if mark is None:
            return
        yield from _read_group(marks, feed.space + mark, feed, teller)


def _read_group(marks: JsonMarks, mark: str, feed: TextFeed, teller: CallTeller) -> Parser:
    """Behind an opening mark: its objects and what closes them; the mark is content if there are none."""
    space = yield from feed.skip_space()
    bracket = "[" if feed.text.startswith("[") else ""
    feed.take(len(bracket))
    before = mark + space + bracket
    while True:
        before += yield from feed.skip_space()
        if not (yield from _read_object(feed, teller)):
            if not (feed.ended and feed.cut):
                teller.content(before)
            elif "{".startswith(feed.text[:1]):
                feed.text = ""
            return
        space = yield from feed.skip_space()
        if feed.text[:1] not in _BETWEEN or not feed.text:
            break
        before = feed.take(1)
    if bracket and feed.text.startswith("]"):
        feed.take(1)
        space = yield from feed.skip_space()
    closing = yield from feed.starts(marks.closings)
    if closing is not None:
        feed.take(len(closing))
    elif feed.ended and feed.cut and any(each.startswith(feed.text) for each in marks.closings):
        feed.text = ""
    else:
        feed.text = space + feed.text


def _read_object(feed: TextFeed, teller: CallTeller) -> Parser:
    """One call; False, and nothing used up, where there is none."""
    end, looked_at = JsonEnd(), 0
    while True:
        head = _HEAD.match(feed.text)
        if head is not None:
            break
        found = end.find(feed.text, looked_at)
        looked_at = len(feed.text)
        if found is not None:
            call = read_call(feed.text[:found])
            if call is None or not teller.knows(call[0]):
                return False
            feed.take(found)
            teller.call(*call)
            return True
        if end.is_broken or feed.ended:
            return False
        yield
    if not teller.knows(head[1]):
        return False
    feed.take(head.end())
    teller.start(head[1])
    if (yield from tell_object(feed, teller)) and (yield from _skip_object(feed)):
        teller.end()
    return True


def tell_object(feed: TextFeed, teller: CallTeller) -> Parser:
    """Tell a JSON object as arguments, as it comes; False where the reply ends, or is no JSON, within it."""
    if teller.takes_grammar:
        return (yield from _tell_grammar(feed, teller))
    end = JsonEnd()
    while True:
        size = end.find(feed.text, 0)
        if end.broken_at is not None:
            teller.arguments(feed.take(end.broken_at))
            return False
        teller.arguments(feed.take(len(feed.text) if size is None else size))
        if size is not None:
            return True
        if feed.ended:
            return False
        yield


def _tell_grammar(feed: TextFeed, teller: CallTeller) -> Parser:
    """Tell the text of a grammar, which is written as it is in place of a JSON string, and ends the reply."""
    while (head := _RAW_HEAD.match(feed.text)) is None:
        if feed.ended:
            return False
        yield
    feed.take(head.end())
    while not feed.ended:
        at = feed.text.rfind(RAW_TAIL)
        size = len(feed.text) - feed.text.endswith(RAW_TAIL[0]) if at < 0 else at
        teller.input_text(feed.take(size))
        yield
    if feed.cut or RAW_TAIL not in feed.text:
        feed.text = ""
        return False
    teller.input_text(feed.take(feed.text.rindex(RAW_TAIL)))
    feed.take(len(RAW_TAIL))
    return True


def _skip_object(feed: TextFeed) -> Parser:
    """Use up what is left of the object around the arguments; False where the reply ends within it."""
    end = JsonEnd()
    end.find("{", 0)
    while True:
        size = end.find(feed.text, 0)
        if size is not None:
            feed.take(size)
            return True
        feed.take(len(feed.text) if end.broken_at is None else end.broken_at)
        if end.is_broken or feed.ended:
            return False
        yield


def read_call(text: str) -> tuple[str, str] | None:
    """A tool's name and the JSON text of its arguments; None if `text` is no call."""
    try:
        call: Any = json.loads(text, parse_constant=_refuse_constant)
        arguments = next((call[key] for key in _ARGUMENT_KEYS if key in call), None)
        if isinstance(arguments, str):  # some models quote them, as OpenAI's own format does
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return None
        return call["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError, AttributeError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
