"""Calls that are a name behind a mark and then a JSON object: deepseek, kimi, mistral's newer templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.text.reply.text_feed import Parser, TextFeed, text_until
from engine.text.structured_output import CallForm, CallForms, CallPart, Pattern
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.json_calls import tell_object
from engine.text.tools.kept_calls import arguments_object
from engine.text.tools.tool_spec import ToolSpec

_MAX_HEAD = 256


@dataclass(frozen=True, slots=True)
class HeadMarks:
    """How calls stand in text: `call`, a head in which `name` finds the tool's, one of `body`, the object.

    `around` are marks that stand next to calls and say nothing more; whitespace next to any belongs to it.
    `written` is what the templates write before and behind the object: of the head, with the tool's name for
    `NAME`, and with a number for `NUMBER`.
    """

    call: str
    body: tuple[str, ...]
    name: re.Pattern[str]
    written: tuple[str, str]
    around: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts that a call may begin with."""
        return (self.call, *self.around)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that a reader has to see."""
        return (*self.openings, *self.body)


def kept_headed(marks: HeadMarks, tools: Sequence[ToolSpec]) -> CallForms:
    """The calls as grammars hold them."""
    forms = []
    for tool in tools:
        head, number, rest = marks.written[0].replace("NAME", tool.name).partition("NUMBER")
        parts, is_last = arguments_object(tool, rest if number else head, marks.written[1])
        counted: tuple[CallPart, ...] = (head, Pattern("[0-9]{1,3}")) if number else ()
        forms.append(CallForm(marks.call, (*counted, *parts), is_last))
    return CallForms(tuple(forms), marks.around)


def read_headed_calls(marks: HeadMarks, feed: TextFeed, teller: CallTeller) -> Parser:
    """Parse a reply's content. Arguments are told as they come."""
    while True:
        mark = yield from teller.copy_until(feed, marks.openings)
        if mark is None:
            return
        if mark in marks.around:
            yield from feed.skip_space()
            continue
        yield from _read_call(marks, feed.space + mark, feed, teller)


def _read_call(marks: HeadMarks, before: str, feed: TextFeed, teller: CallTeller) -> Parser:
    """One call behind its mark; the text is content where there is none."""
    head = yield from text_until(feed, (*marks.body, *marks.openings), _MAX_HEAD)
    if head is None:
        if feed.ended and feed.cut:
            feed.text = ""
        else:
            teller.content(before)
        return
    text, stop = head
    if stop in marks.openings:
        feed.text = stop + feed.text
        teller.content(before + text)
        return
    if stop == "{":
        feed.text, stop = stop + feed.text, ""
    found = marks.name.fullmatch(text.strip())
    space = yield from feed.skip_space()
    if found is None or not teller.knows(found[1]) or not feed.text.startswith("{"):
        if not (feed.ended and feed.cut and not feed.text):
            teller.content(before + text + stop + space)
        return
    teller.start(found[1])
    if (yield from tell_object(feed, teller)):
        teller.end()
        yield from feed.skip_space()
