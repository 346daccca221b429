"""Server-sent events as clients parse them: `data: {json}` with LF, one write an event.

A stream of OpenAI's completions ends with `[DONE]`; events of other APIs have names, the last one is the end.
Ollama's are lines of JSON.

The only place that knows the wire formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.json_reply import encode_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_START, EVENT_END = b"data: ", b"\n\n"  # around the JSON of one that leaves in pieces

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Framing:
    """How the events of one stream lie on the wire. `idle` may come between two of them, and says nothing."""

    start: Callable[[str], bytes]  # by the event's name
    end: bytes = EVENT_END
    idle: bytes = KEEP_ALIVE
    media_type: str = "text/event-stream"

    def whole(self, name: str, payload: Mapping[str, object]) -> bytes:
        """One whole event; ASCII, so that no reader can split a character."""
        return self.start(name) + encode_json(payload).encode("ascii") + self.end


def encode_event(payload: Mapping[str, object]) -> bytes:
    """One whole event; ASCII, so that no reader can split a character."""
    return EVENT_START + encode_json(payload).encode("ascii") + EVENT_END


def _named_start(name: str) -> bytes:
    return b"event: " + name.encode("ascii") + b"\n" + EVENT_START


NAMED_EVENTS = Framing(_named_start)
BARE_EVENTS = Framing(lambda _: EVENT_START)
# Readers take each line for an object, empty ones too.
JSON_LINES = Framing(lambda _: b"", b"\n", b"", "application/x-ndjson")


class Silence:
    """How long a stream has said nothing: what comes in meanwhile may show nothing to the client."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self.end()

    def end(self) -> None:
        """Something was sent."""
        self._due = self._loop.time() + self._limit_s

    def limit(self) -> asyncio.Timeout:
        """A wait within it ends with TimeoutError when something has to be sent."""
        return asyncio.timeout_at(self._due)


async def begin_stream(
    chunks: AsyncGenerator[bytes, None],
    on_end: Callable[[], None],
    last: Callable[[Exception | None], Iterable[bytes]],
    media_type: str = NAMED_EVENTS.media_type,
) -> EventStream:
    """The reply that sends `chunks`, the first of which is there. Raises what comes in its place.

    `last` gives what is sent behind them, with the error that ended them early, if any.
    """
    try:
        first = await anext(chunks)
    except BaseException:
        on_end()
        raise
    return EventStream(_all_of(first, chunks, last), on_end, media_type)


async def _all_of(
    first: bytes, chunks: AsyncGenerator[bytes, None], last: Callable[[Exception | None], Iterable[bytes]]
) -> AsyncGenerator[bytes, None]:
    failure: Exception | None = None
    yield first
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        failure = error
    for chunk in last(failure):
        yield chunk


class EventStream(Response):
    """A reply that sends each item of `events` as it comes. `on_end` is called exactly once, however it ends.

    Never reads from the client: ClientMiddleware cancels it when the client goes.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        media_type: str = NAMED_EVENTS.media_type,
    ) -> None:
        # Not the base class's: it would render a body and announce its length.
        self.status_code = 200
        self.background = None
        self.media_type = media_type  # Starlette adds the charset to a text
        self.init_headers(_HEADERS)
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, every event, and the end."""
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()
