"""Calls as `call:NAME{key:value,...}` with quotes that are tokens of their own: gemma 4, functiongemma.

They are told as JSON while they are written. Where one turns out to be none of this form, it breaks off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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

_HEAD = re.compile(r"\A\s{0,64}call:([\w.\-]{1,256})\s{0,64}\{")
_PART_OF_HEAD = re.compile(r"\A\s{0,64}(c|ca|cal|call|call:[\w.\-]{0,256}\s{0,64})?\Z")
_BARE_ENDS = tuple(",[]{}:")
# Of a JSON string: what may stand in it, and an escape of which the end has not come.
_BODY = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_PART_OF_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?\Z")
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Braces:
    """How calls stand in text: `opening`, the call, `closing`; a text in it stands between two `quote`s."""

    opening: str
    closing: str
    quote: str


def read_braced_calls(braces: Braces, feed: TextFeed, teller: CallTeller) -> Parser:
    """Parse a reply's content. Arguments are told as they come, once the tool is known."""
    while True:
        mark = yield from teller.copy_until(feed, (braces.opening,))
        if mark is None:
            return
        before = feed.space + mark
        while (head := _HEAD.match(feed.text)) is None and _PART_OF_HEAD.match(feed.text) and not feed.ended:
            yield
        if head is not None and teller.knows(head[1]):
            feed.take(head.end())
            yield from _read_call(_Arguments(braces.quote, feed, teller), head[1], braces.closing)
        elif head is None and feed.cut and _PART_OF_HEAD.match(feed.text):
            feed.text = ""
        else:
            teller.content(before)


def _read_call(arguments: _Arguments, name: str, closing: str) -> Parser:
    """One call behind its opening brace, and what closes it."""
    feed, teller = arguments.feed, arguments.teller
    teller.start(name)
    if not (yield from arguments.tell_pairs(0)):
        if feed.ended:
            feed.text = ""
        return
    teller.end()
    space = yield from feed.skip_space()
    if (yield from feed.starts((closing,))) is not None:
        feed.take(len(closing))
    elif feed.ended and feed.cut and closing.startswith(feed.text):
        feed.text = ""
    else:
        feed.text = space + feed.text


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


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Tells the arguments of one call as JSON. What returns False has met the reply's end, or no value."""

    quote: str
    feed: TextFeed
    teller: CallTeller

    def tell_pairs(self, depth: int) -> Parser:
        """An object, behind its opening brace."""
        return (yield from self._tell_all("{", "}", self._tell_pair, depth))

    def _tell_items(self, depth: int) -> Parser:
        """A list, behind its opening bracket."""
        return (yield from self._tell_all("[", "]", self._tell_value, depth))

    def _tell_all(self, opening: str, closing: str, tell_one: Callable[[int], Parser], depth: int) -> Parser:
        self.teller.arguments(opening)
        before = ""
        while (yield from self._next_char()) != closing:
            self.teller.arguments(before)
            if not (yield from tell_one(depth + 1)) or not (yield from self._goes_on(closing)):
                return False
            before = ", "
        self.teller.arguments(self.feed.take(1))
        return True

    def _tell_pair(self, depth: int) -> Parser:
        key = yield from self._key()
        if key is None or (yield from self._next_char()) != ":":
            return False
        self.feed.take(1)
        self.teller.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        return (yield from self._tell_value(depth))

    def _tell_value(self, depth: int) -> Parser:
        char = yield from self._next_char()
        if not char or depth > _MAX_DEPTH:
            return False
        if (yield from self._takes_quote()):
            self.teller.arguments('"')
            return (yield from self.teller.tell_text(self.feed, (self.quote,)))
        if char in ('"', "[", "{"):
            self.feed.take(1)
            tell = {'"': self._tell_string, "[": self._tell_items, "{": self.tell_pairs}[char]
            return (yield from tell(depth))
        word = yield from self._word()
        if word is None:
            return False
        self.teller.arguments(_json_of(word))
        return True

    def _tell_string(self, _depth: int) -> Parser:
        """The rest of a JSON string, behind its opening quote, as it is written."""
        self.teller.arguments('"')
        is_whole = yield from self._read_string(self.teller.arguments)
        if is_whole:
            self.teller.arguments('"')
        return is_whole

    def _read_string(self, take: Callable[[str], None]) -> Parser:
        """What stands in a JSON string, behind its opening quote, bit by bit; its closing one is used up."""
        while True:
            body = _BODY.match(self.feed.text)
            take(self.feed.take(0 if body is None else body.end()))
            if self.feed.text.startswith('"'):
                self.feed.take(1)
                return True
            if self.feed.ended or (self.feed.text and not _PART_OF_ESCAPE.match(self.feed.text)):
                return False
            yield

    def _key(self) -> Parser:
        """A key in any of the ways that texts are written; None where there is none."""
        if (yield from self._takes_quote()):
            found = yield from text_until(self.feed, (self.quote,))
            return None if found is None else found[0]
        if not self.feed.text.startswith('"'):
            return (yield from self._word())
        self.feed.take(1)
        bits: list[str] = []
        is_whole = yield from self._read_string(bits.append)
        return json.loads(f'"{"".join(bits)}"') if is_whole else None

    def _word(self) -> Parser:
        """What stands without quotes up to the next mark of the form; None where the reply ends before it."""
        found = yield from text_until(self.feed, _BARE_ENDS)
        if found is None:
            return None
        word, end = found
        self.feed.text = end + self.feed.text
        return word.strip()

    def _goes_on(self, end: str) -> Parser:
        """True at a comma, which is used up, or before `end`."""
        char = yield from self._next_char()
        if char == ",":
            self.feed.take(1)
        return char in (",", end)

    def _takes_quote(self) -> Parser:
        found = yield from self.feed.starts((self.quote,))
        if found is not None:
            self.feed.take(len(found))
        return found is not None

    def _next_char(self) -> Parser:
        """The next character that is no whitespace; empty at the reply's end."""
        yield from self.feed.skip_space()
        return self.feed.text[:1]


def _json_of(word: str) -> str:
    """A word that stands without quotes, as JSON: a value where it is one of JSON's, else a text."""
    try:
        value = json.loads(word)
    except ValueError:
        value = word
    if isinstance(value, float) and not isfinite(value):  # JSON has no number for it
        value = word
    return json.dumps(value, ensure_ascii=False)


def _format(braces: Braces, *, names_results: bool = False) -> ToolFormat:
    return ToolFormat(
        signs=((braces.opening,),),
        openings=(braces.opening,),
        marks=(braces.opening, braces.closing, braces.quote),
        read=partial(read_braced_calls, braces),
        forced_as=HERMES,
        kept=partial(kept_braced, braces),
        names_results=names_results,
    )


GEMMA4 = _format(Braces("<|tool_call>", "<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = _format(
    Braces("<start_function_call>", "<end_function_call>", "<escape>"), names_results=True
)
