"""CallTeller: tells the calls of one reply by its request's rules, whatever format they are written in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.text.reply.pieces import CallArguments, CallEnd, CallStart, ContentText, Piece
from engine.text.reply.text_feed import Parser, TextFeed, copy_until
from engine.text.tools.input_text import InputText
from engine.text.tools.kept_calls import grammar_of
from engine.text.tools.tool_spec import ToolRules, ToolSpec


class CallTeller:
    """Numbers the calls, and leaves out those that are too many.

    Only known tools are called: what looks like a call of another one is content. `writes_grammars`: the
    input of a tool with a grammar is held by it, and is no JSON string.
    """

    def __init__(
        self, rules: ToolRules, tell: Callable[[Piece], None], *, writes_grammars: bool = False
    ) -> None:
        self._tools: Mapping[str, ToolSpec] = {tool.name: tool for tool in rules.callable_tools}
        self._most = None if rules.takes_several else 1
        self._tell = tell
        self._is_told = False  # the call that is open
        self._has_started = False  # any call
        self._input: InputText | None = None  # of the open call, where its tool is custom
        self._writes_grammars = writes_grammars
        self._takes_grammar = False
        self.num_calls = 0

    def knows(self, name: str) -> bool:
        """True for a tool that may be called."""
        return name in self._tools

    def schema_of(self, name: str, key: str) -> Mapping[str, Any]:
        """The schema of one argument; empty where there is none."""
        properties = self._tools[name].schema.get("properties")
        found = properties.get(key) if isinstance(properties, dict) else None
        return found if isinstance(found, dict) else {}

    def content(self, text: str) -> None:
        """Text that belongs to no call."""
        if text:
            self._tell(ContentText(text))

    def copy_until(self, feed: TextFeed, marks: Sequence[str]) -> Parser:
        """Tell the text up to the first mark as content; whitespace next to a call belongs to the format."""
        found = yield from copy_until(feed, marks, self.content, strip=True, strip_end=self._has_started)
        return found

    def start(self, name: str) -> None:
        """A call of a known tool begins."""
        self._has_started = True
        self._takes_grammar = self._writes_grammars and grammar_of(self._tools[name]) is not None
        self._is_told = self._most is None or self.num_calls < self._most
        if self._is_told:
            is_custom = self._tools[name].is_custom
            self._input = InputText() if is_custom else None
            self._tell(CallStart(self.num_calls, name, is_custom=is_custom))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the open call's arguments, as JSON."""
        if self._input is not None:
            text = self._input.feed(text)
        self._tell_arguments(text)

    def _tell_arguments(self, text: str) -> None:
        if self._is_told and text:
            # JSON can spell half of a surrogate pair, which no text may hold.
            text = text.encode("utf-8", "replace").decode()
            self._tell(CallArguments(self.num_calls - 1, text, self._input is not None))

    @property
    def takes_grammar(self) -> bool:
        """True if the input of the open call is the text of its grammar, written as it is."""
        return self._takes_grammar

    def tell_text(self, feed: TextFeed, closings: Sequence[str]) -> Parser:
        """Tell a text up to the first of its closing marks as the rest of a JSON string, as it comes.

        False where the reply ends within it.
        """
        while True:
            at, mark = feed.find(closings)
            told = json.dumps(feed.take(at), ensure_ascii=False)[1:-1]
            self.arguments(told if mark is None else told + '"')
            if mark is not None:
                feed.take(len(mark))
                return True
            if feed.ended:
                return False
            yield

    def input_text(self, text: str) -> None:
        """More of the open call's input, as text."""
        self._tell_arguments(text)

    def end(self) -> None:
        """The open call is complete."""
        if self._input is not None:
            self._tell_arguments(self._input.finish())
        if self._is_told:
            self._tell(CallEnd(self.num_calls - 1))
        self._is_told, self._input = False, None

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.start(name)
        self.arguments(arguments)
        self.end()
