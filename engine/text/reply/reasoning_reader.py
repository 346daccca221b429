"""read_reasoning: parts a reply's text into what was thought and what is said."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.text.reply.pieces import Piece
from engine.text.reply.reasoning_format import ReasoningFormat
from engine.text.reply.reasoning_place import Phase
from engine.text.reply.text_feed import Parser, TextFeed, copy_until, tell_content, tell_reasoning


def read_reasoning(
    form: ReasoningFormat, phase: Phase, feed: TextFeed, tell: Callable[[Piece], None], calls: Collection[str]
) -> Parser:
    """Parse a reply that begins in `phase`. `calls` are marks of tool calls, which end a reasoning as well.

    They stay in the text that is told as content.
    """
    if phase is Phase.BEFORE:
        phase = yield from _read_opening(form, feed)
    while True:
        if phase is Phase.THINKING:
            yield from feed.skip_space()
            mark = yield from copy_until(feed, (form.end, *calls), tell_reasoning(tell), strip=True)
            if mark is None:
                return
            if mark in calls:
                feed.text = mark + feed.text
            else:
                yield from feed.skip_space()
        mark = yield from _read_content(form, feed, tell)
        if mark is None:
            return
        phase = Phase.THINKING


def _read_opening(form: ReasoningFormat, feed: TextFeed) -> Parser:
    """Up to where it is known what the reply begins with."""
    space = yield from feed.skip_space()
    mark = yield from feed.starts((form.begin, form.end))
    if mark is None:
        is_cut_mark = feed.ended and feed.cut and feed.text and form.begin.startswith(feed.text)
        feed.text = "" if is_cut_mark else space + feed.text
        return Phase.AFTER
    feed.take(len(mark))
    if mark == form.begin:
        return Phase.THINKING
    yield from feed.skip_space()
    return Phase.AFTER


def _read_content(form: ReasoningFormat, feed: TextFeed, tell: Callable[[Piece], None]) -> Parser:
    """Behind a reasoning, or without one: up to the next one, or to the end."""
    opening, closing = form.answer or ("", "")
    if opening:
        mark = yield from feed.starts((opening,))
        if mark is not None:
            feed.take(len(mark))
            yield from feed.skip_space()
    marks = (form.begin,) if form.repeats else ()
    tell_text = tell_content(tell)
    while True:
        mark = yield from copy_until(feed, (*marks, closing) if closing else marks, tell_text)
        if mark is None or mark == form.begin:
            return mark
