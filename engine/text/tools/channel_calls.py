"""Replies as messages with a header each, which says a channel and whom it is for: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from engine.text.reply.text_feed import Parser, TextFeed, copy_until, text_until
from engine.text.structured_output import CallForm, CallForms, Repeated
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.json_calls import tell_object
from engine.text.tools.json_formats import HERMES
from engine.text.tools.kept_calls import arguments_object
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_spec import ToolSpec

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CONSTRAIN = "<|constrain|>"
_RECIPIENT = re.compile(r"to=functions\.([\w.\-]+)")
_MAX_HEAD = 256


class ChannelReader:
    """Parses one reply. What is thought goes to `think`, all else to `teller`; no header is ever told.

    Text that stands in no message is content: a reply that must have a form may be nothing else.
    """

    def __init__(self, feed: TextFeed, teller: CallTeller, think: Callable[[str], None]) -> None:
        self._feed = feed
        self._teller = teller
        self._think = think

    def read(self, *, within_thought: bool) -> Parser:
        """The parser; `within_thought`: the prompt has begun the first message, which is thought."""
        if within_thought:
            yield from self._copy(self._think)
        feed, head = self._feed, ""
        while True:
            mark = yield from copy_until(feed, (_START, _CHANNEL, _MESSAGE, *_ENDS), self._teller.content)
            if mark is None:
                return
            if mark in _ENDS:
                continue
            head = ""
            while mark in (_START, _CHANNEL):
                found = yield from text_until(feed, (_START, _CHANNEL, _MESSAGE, *_ENDS), _MAX_HEAD)
                if found is None:
                    break
                head, mark = f"{head} {found[0]}", found[1]
            if mark == _MESSAGE:
                yield from self._read_message(head)
            elif feed.ended:
                feed.text = ""

    def _read_message(self, head: str) -> Parser:
        recipient = _RECIPIENT.search(head)
        if recipient is not None and self._teller.knows(recipient[1]):
            space = yield from self._feed.skip_space()
            if self._feed.text.startswith("{"):
                self._teller.start(recipient[1])
                if (yield from tell_object(self._feed, self._teller)):
                    self._teller.end()
                    yield from self._feed.skip_space()
                return
            self._feed.text = space + self._feed.text
        yield from self._copy(self._think if "analysis" in head.split() else self._teller.content)

    def _copy(self, tell: Callable[[str], None]) -> Parser:
        """The body of a message."""
        mark = yield from copy_until(self._feed, (_START, *_ENDS), tell)
        if mark == _START:
            self._feed.text = mark + self._feed.text


def _kept(tools: Sequence[ToolSpec]) -> CallForms:
    """The calls as grammars hold them: from the recipient on, which no text names, either."""
    headers = Repeated(
        (
            (f" {_CONSTRAIN}json",),
            (f"{_CHANNEL}commentary {_CONSTRAIN}json",),
            (f"{_CHANNEL}commentary json",),
            (" json",),
        )
    )
    forms = []
    for tool in tools:
        parts, is_last = arguments_object(tool, _MESSAGE, "")
        forms.append(CallForm("to=functions.", (tool.name, headers, *parts), is_last))
    return CallForms(tuple(forms), (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS))


def _read_content(feed: TextFeed, teller: CallTeller) -> Parser:
    """For a model whose reasoning nobody is to tell apart."""
    yield from ChannelReader(feed, teller, teller.content).read(within_thought=False)


CHANNELS = ToolFormat(
    signs=((_CHANNEL, "to=functions."), (_CHANNEL, "functions.")),
    openings=(_CHANNEL,),
    marks=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    read=_read_content,
    forced_as=HERMES,
    kept=_kept,
    shows_one=True,
)
