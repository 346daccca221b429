"""TextFeed: the text of a reply that a parser has not used yet, and Stage, which runs a parser over it.

A parser is a generator that yields where it needs more text. It decides nothing by how much of the text is
there, only by what it says or by the reply's end, so its result does not depend on where the text was split.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeAlias

from engine.text.reply.pieces import ContentText, Piece, ReasoningText

Parser: TypeAlias = Generator[None, None, Any]

_MOST_CHARS = 2048  # given to a parser at a time: it may look through all that it has for every mark in it


class TextFeed:
    """Text still to be read. `ended`: no more of it comes; `cut`: because the reply did not end by itself.

    `space` is the whitespace that was left out before the last mark.
    """

    __slots__ = ("cut", "ended", "space", "text")

    def __init__(self) -> None:
        self.text = ""
        self.space = ""
        self.ended = False
        self.cut = False

    def take(self, size: int) -> str:
        """The next `size` characters, which are used up."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def skip_space(self) -> Parser:
        """Use up whitespace, up to other text or the end, and return it."""
        space = ""
        while True:
            rest = self.text.lstrip()
            space += self.take(len(self.text) - len(rest))
            if rest or self.ended:
                return space
            yield

    def find(self, marks: Iterable[str]) -> tuple[int, str | None]:
        """Where the first mark stands, and which it is: the longest of several. None: as far as none can."""
        found = [(at, -len(mark), mark) for mark in marks if (at := self.text.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            return at, mark
        return len(self.text) - self.num_held(marks), None

    def num_held(self, marks: Iterable[str]) -> int:
        """Length of the longest end of the text that may yet become a mark."""
        longest = max((len(mark) for mark in marks), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(len(mark) > size and mark.startswith(self.text[-size:]) for mark in marks):
                return size
        return 0

    def starts(self, marks: Sequence[str]) -> Generator[None, None, str | None]:
        """Wait until it is known which of the marks comes next, the longest of several; None: none does."""
        while True:
            longer = any(len(mark) > len(self.text) and mark.startswith(self.text) for mark in marks)
            if not longer or self.ended:
                found = [mark for mark in marks if self.text.startswith(mark)]
                return max(found, key=len, default=None)
            yield


def copy_until(
    feed: TextFeed,
    marks: Sequence[str],
    tell: Callable[[str], None],
    *,
    strip: bool = False,
    strip_end: bool = False,
) -> Generator[None, None, str | None]:
    """Tell all text before the first mark and use the mark up; which one it is, None at the reply's end.

    `strip` leaves out whitespace that stands before a mark, for it belongs to the mark; `strip_end` that at
    the reply's end, too. Of a mark that a reply's end cuts short nothing is told if the reply was cut, too.
    """
    while True:
        at, mark = feed.find(marks)
        if mark is None and feed.ended and not feed.cut:
            at = len(feed.text)
        is_end = mark is None and feed.ended and at == len(feed.text)
        told = len(feed.text[:at].rstrip()) if (strip_end if is_end else strip) else at
        if told:
            tell(feed.take(told))
            at -= told
        if mark is not None:
            feed.space = feed.take(at)
            feed.take(len(mark))
            return mark
        if feed.ended:
            feed.text = ""
            return None
        yield


class Stage:
    """Runs a parser over text that comes bit by bit. Nothing that a model writes makes it raise."""

    def __init__(self, make: Callable[[TextFeed, Callable[[Piece], None]], Parser]) -> None:
        self._feed = TextFeed()
        self._pieces: list[Piece] = []
        self._parser: Parser | None = make(self._feed, self._pieces.append)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are known with `text`."""
        pieces: list[Piece] = []
        for start in range(0, len(text), _MOST_CHARS):
            self._feed.text += text[start : start + _MOST_CHARS]
            pieces += self._run()
        return pieces

    def finish(self, *, cut: bool) -> list[Piece]:
        """The rest, once the reply has ended; `cut` says that it did not end by itself."""
        self._feed.ended, self._feed.cut = True, cut
        return self._run()

    def _run(self) -> list[Piece]:
        if self._parser is not None:
            try:
                next(self._parser)
            except StopIteration:
                self._parser = None
        pieces = self._pieces.copy()
        self._pieces.clear()
        return pieces


def tell_reasoning(tell: Callable[[Piece], None]) -> Callable[[str], None]:
    """Tells text as reasoning."""
    return lambda text: tell(ReasoningText(text)) if text else None


def tell_content(tell: Callable[[Piece], None]) -> Callable[[str], None]:
    """Tells text as content."""
    return lambda text: tell(ContentText(text)) if text else None


def text_until(
    feed: TextFeed, marks: Sequence[str], most: int | None = None
) -> Generator[None, None, tuple[str, str] | None]:
    """The text before the first mark, and the mark, both used up; None where the reply ends before one.

    None, too, where it would be more than `most` characters. With None nothing is used up.
    """
    passed: list[str] = []  # known to hold no mark: a long text is not looked through at every bit of it
    size = 0
    while True:
        at, mark = feed.find(marks)
        size += at
        passed.append(feed.take(at))
        is_long = most is not None and size > most
        if mark is not None and not is_long:
            return "".join(passed), feed.take(len(mark))
        if is_long or feed.ended:
            feed.text = "".join(passed) + feed.text
            return None
        yield
