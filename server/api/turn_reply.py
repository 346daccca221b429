"""Turn replies: one generated message as an HTTP reply, JSON or events, in any API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response

from engine import OutputDelta
from server.api.blocks import BlockEvent, BlockWriter
from server.api.generation import Choice, Generation
from server.http.context import ServerContext
from server.http.json_pieces import LargeJson, encoded_off_loop
from server.http.json_reply import json_response
from server.http.sse import NAMED_EVENTS, Framing, Silence, begin_stream

# More of it is encoded off the loop: it would take the loop some milliseconds.
LARGE_CHARS = 262_144


@dataclass(frozen=True, slots=True)
class NamedEvent:
    """One event of a stream; a large one is encoded off the loop."""

    name: str
    payload: Mapping[str, object]
    is_large: bool = False


class TurnShape(Protocol):
    """How one API spells the reply of a turn."""

    def events(
        self, choice: Choice, delta: OutputDelta, blocks: Sequence[BlockEvent]
    ) -> Iterable[NamedEvent]:
        """What shows `delta`, which came to `blocks`."""
        ...

    def silence(self) -> Iterable[NamedEvent]:
        """What is sent when nothing came for a while; nothing means a comment."""
        ...

    def failure(self, error: Exception) -> Iterable[NamedEvent]:
        """The end of a stream that `error` cut short."""
        ...

    def whole(self) -> Mapping[str, object]:
        """The reply in one piece, after all its events: these are made in any case, so that both agree."""
        ...


async def respond(
    context: ServerContext,
    generation: Generation,
    shape: TurnShape,
    *,
    streams: bool,
    framing: Framing = NAMED_EVENTS,
) -> Response:
    """The response: at the first event of a stream, or at the end for JSON.

    Raises what the generation ends with before that: nothing has been sent, so it can be a status.
    """
    if streams:
        events = _events(context, generation, shape, framing)
        return await begin_stream(
            events, generation.close, lambda error: _last(shape, error, framing), framing.media_type
        )
    writer, is_large = BlockWriter(), False
    try:
        while generation.is_open:
            choice, delta = await generation.next()
            for event in shape.events(choice, delta, writer.write(choice, delta)):
                is_large |= event.is_large
    finally:
        generation.close()
    reply = shape.whole()
    return LargeJson(reply, context.large_replies) if is_large else json_response(reply)


def _last(shape: TurnShape, error: Exception | None, framing: Framing) -> list[bytes]:
    return [] if error is None else [framing.whole(each.name, each.payload) for each in shape.failure(error)]


async def _events(
    context: ServerContext, generation: Generation, shape: TurnShape, framing: Framing
) -> AsyncGenerator[bytes, None]:
    writer, silence = BlockWriter(), Silence(context.settings.server.sse_keepalive_seconds)
    while generation.is_open:
        try:
            async with silence.limit():
                choice, delta = await generation.next()
        except TimeoutError:
            events = [framing.whole(each.name, each.payload) for each in shape.silence()]
            yield b"".join(events) or framing.idle
            silence.end()
            continue
        for event in shape.events(choice, delta, writer.write(choice, delta)):
            if not event.is_large:
                yield framing.whole(event.name, event.payload)
                silence.end()
                continue
            yield framing.start(event.name)
            async with aclosing(encoded_off_loop(event.payload, context.large_replies)) as pieces:
                async for piece in pieces:
                    yield piece
            yield framing.end
            silence.end()
