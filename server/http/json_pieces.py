"""Large JSON, piece by piece and off the event loop: what it tells and its text are never there as a whole.

The library's encoder holds the interpreter for its whole run; here every run is a short one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from itertools import islice

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.long_list import LongList
from server.http.json_reply import encode_json
from server.http.turns import Turns

PIECE_BYTES = 65_536
# What is encoded in one run: a millisecond's work, or a few.
_CHARS = 16_384  # of a text
_VALUES = 1_024  # of a flat list
_RECORDS = 16  # of a list whose items are made as they are read


def json_pieces(value: object) -> Iterator[bytes]:
    """What `encode_json` writes, in pieces of `PIECE_BYTES` or a little more; an iterator is a list, too."""
    waiting: list[str] = []
    size = 0
    for text in _texts(value):
        waiting.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield "".join(waiting).encode("ascii")
            waiting.clear()
            size = 0
    if waiting:
        yield "".join(waiting).encode("ascii")


def _texts(value: object) -> Iterator[str]:
    match value:
        case str() if len(value) > _CHARS:
            yield '"'
            for first in range(0, len(value), _CHARS):
                yield encode_json(value[first : first + _CHARS])[1:-1]
            yield '"'
        case Mapping():
            yield from _object_texts(value)
        case LongList():
            yield from _list_texts(value, _RECORDS)
        case list() | tuple() if value and not isinstance(value[0], Mapping):
            yield from _list_texts(value, _VALUES)
        case list() | tuple() | Iterator():
            yield from _item_texts(value)
        case _:
            yield encode_json(value)


def _object_texts(value: Mapping[str, object]) -> Iterator[str]:
    before = "{"
    for key, item in value.items():
        yield f"{before}{encode_json(key)}:"
        yield from _texts(item)
        before = ","
    yield "{}" if before == "{" else "}"


def _item_texts(items: Iterable[object]) -> Iterator[str]:
    before = "["
    for item in items:
        yield before
        yield from _texts(item)
        before = ","
    yield "[]" if before == "[" else "]"


def _list_texts(items: Iterable[object], size: int) -> Iterator[str]:
    left, before = iter(items), "["
    while batch := list(islice(left, size)):
        yield before + encode_json(batch)[1:-1]
        before = ","
    yield "[]" if before == "[" else "]"


async def encoded_off_loop(value: object, turns: Turns) -> AsyncGenerator[bytes, None]:
    """The pieces of `value`, each made in a thread, in turn, when the one before was taken."""
    pieces = json_pieces(value)
    while piece := await turns.run(lambda: next(pieces, b""), PIECE_BYTES):
        yield piece


class LargeJson(Response):
    """A JSON reply that is encoded as it is sent: no more of it waits than its client is about to read."""

    media_type = "application/json"

    def __init__(self, value: object, turns: Turns) -> None:
        """It is encoded in `turns`."""
        # Not the base class's: it would render a body and announce its length.
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._value: object = value
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, every piece, and the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(encoded_off_loop(self._value, self._turns)) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
