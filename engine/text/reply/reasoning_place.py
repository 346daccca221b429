"""ReasoningTrack: where in its reasoning a reply is, told by its tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from engine.text.reply.reasoning_format import ReasoningFormat

_SPACE = b" \t\r\n"


class Phase(Enum):
    """Before anything but whitespace was said; in the reasoning; behind it, or beyond having any."""

    BEFORE = "before"
    THINKING = "thinking"
    AFTER = "after"


class Place(NamedTuple):
    """Where a reply is. `tail` are its last bytes, as far as a mark may still come of them.

    `num_thought` counts tokens of the reasoning, marks left out where they are tokens of their own. `surplus`
    are the bytes behind the mark that the newest token has completed.
    """

    phase: Phase
    tail: bytes = b""
    num_thought: int = 0
    surplus: bytes = b""


class ReasoningTrack:
    """Follows one format's marks through any reply; places are values, so drafts are followed as well.

    `table` holds the bytes of each token, special ones spelled out. Any thread.
    """

    def __init__(self, form: ReasoningFormat, table: Sequence[bytes]) -> None:
        self.form = form
        self._table = table
        self._begin, self._end = form.begin.encode(), form.end.encode()

    def start(self, prompt_token_ids: Sequence[int]) -> Place:
        """Where a reply to this prompt begins."""
        last = b""
        wanted = len(self._begin) + len(self._end) + 16
        for token_id in reversed(prompt_token_ids):
            last = self.bytes_of(token_id) + last
            if len(last) >= wanted:
                break
        last = last.rstrip(_SPACE)
        if last.endswith(self._begin):
            return Place(Phase.THINKING)
        return Place(Phase.AFTER if last.endswith(self._end) else Phase.BEFORE)

    def bytes_of(self, token_id: int) -> bytes:
        """The token spelled out; nothing for an id without a token."""
        return self._table[token_id] if token_id < len(self._table) else b""

    def step(self, place: Place, token_id: int) -> Place:
        """The place behind one more token."""
        return self._STEPS[place.phase](self, place, place.tail + self.bytes_of(token_id))

    def _before(self, place: Place, data: bytes) -> Place:
        data = data.lstrip(_SPACE)
        if data.startswith(self._begin):
            return self._thinking(Place(Phase.THINKING, num_thought=-1), data[len(self._begin) :])
        if data.startswith(self._end):
            return Place(Phase.AFTER)
        if self._begin.startswith(data) or self._end.startswith(data):
            return Place(Phase.BEFORE, data)
        return self._after(Place(Phase.AFTER), data)

    def _thinking(self, place: Place, data: bytes) -> Place:
        at = data.find(self._end)
        if at < 0:
            tail = data[len(data) - len(self._end) + 1 :] if len(data) >= len(self._end) else data
            return Place(Phase.THINKING, tail, place.num_thought + 1)
        return Place(Phase.AFTER, b"", max(0, place.num_thought), data[at + len(self._end) :])

    def _after(self, place: Place, data: bytes) -> Place:
        if not self.form.repeats:
            return place._replace(tail=b"", surplus=b"")
        at = data.find(self._begin)
        if at < 0:
            size = len(self._begin) - 1
            return Place(Phase.AFTER, data[-size:], place.num_thought)
        return self._thinking(
            Place(Phase.THINKING, num_thought=place.num_thought - 1), data[at + len(self._begin) :]
        )

    _STEPS: dict[Phase, Callable[[ReasoningTrack, Place, bytes], Place]] = {  # noqa: RUF012
        Phase.BEFORE: _before,
        Phase.THINKING: _thinking,
        Phase.AFTER: _after,
    }
