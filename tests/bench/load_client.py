"""A cheap HTTP client for bursts of streaming completions, in a process of its own.

Reads one JSON burst a line from stdin and answers with one JSON line on stdout. While a burst runs it only
notes when bytes came; everything is decoded afterwards, so that it takes little of the machine it measures.
Standard library and httptools only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import httptools

from tests.bench.streams import BenchmarkFailed, StreamRecord

DONE = b"[DONE]"


class BurstFailed(BenchmarkFailed):
    """A request of a burst was refused or broke off; the message says how."""


class EventSplitter:
    """Cuts a byte stream into the payloads of its `data:` events; comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return [event[5:].strip() for event in events if event.startswith(b"data:")]


@dataclass(slots=True)
class Stream(asyncio.Protocol):
    """One connection, one request: notes the payload and the arrival time of every event."""

    sent: float = 0.0
    status: int = 0
    payloads: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _transport: asyncio.Transport | None = None
    _splitter: EventSplitter = field(default_factory=EventSplitter)
    _parser: Any = None
    _arrived: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: bytes) -> None:
        """Write the request; the clock starts here."""
        assert self._transport is not None
        self.sent = perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Note the time, then let the HTTP parser take the chunks apart."""
        self._arrived = perf_counter()
        self._parser.feed_data(data)

    def on_status(self, status: bytes) -> None:
        """Called by the parser."""
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Called by the parser, for each chunk of the body."""
        if self.status == 200:
            self.payloads += [(self._arrived, payload) for payload in self._splitter.feed(data)]
        else:
            self.body += data

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the response."""
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """The server hung up, which it may do after the response."""
        self._end()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def read_stream(stream: Stream) -> StreamRecord:
    """What the noted events say. Raises BurstFailed for a refusal, an error event or a stream cut short."""
    if stream.status != 200:
        raise BurstFailed(f"HTTP {stream.status}: {bytes(stream.body[:500]).decode(errors='replace')}")
    if not stream.payloads or stream.payloads[-1][1] != DONE:
        raise BurstFailed(f"the stream broke off after {len(stream.payloads)} events")
    times: list[float] = []
    usage: dict[str, Any] = {}
    for arrived, payload in stream.payloads[:-1]:
        event = json.loads(payload)
        if "error" in event:
            raise BurstFailed(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        if any(choice.get("text") for choice in event["choices"]):
            times.append(arrived)
    if not usage:
        raise BurstFailed("the stream carried no usage")
    return StreamRecord(
        sent=stream.sent,
        event_times=tuple(times),
        num_prompt_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def completion_request(host: str, port: int, body: dict[str, Any]) -> bytes:
    """The bytes of one streaming completion request."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def run_burst(
    host: str, port: int, bodies: list[dict[str, Any]], timeout_s: float
) -> list[StreamRecord]:
    """Connect once for each body, then send all at once and read every stream to its end.

    Raises BurstFailed, also when the burst takes longer than `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    try:
        async with asyncio.timeout(timeout_s):
            for _ in bodies:
                _, stream = await loop.create_connection(Stream, host, port)
                streams.append(stream)
            for stream, body in zip(streams, bodies, strict=True):
                stream.send(completion_request(host, port, body))
            await asyncio.gather(*(stream.ended for stream in streams))
    except TimeoutError as error:
        raise BurstFailed(f"the burst took longer than {timeout_s:.0f} s") from error
    except OSError as error:
        raise BurstFailed(f"no connection to {host}:{port}: {error}") from error
    finally:
        for stream in streams:
            stream.close()
    return [read_stream(stream) for stream in streams]


def answer(line: str) -> dict[str, Any]:
    """Run the burst that one line of stdin asks for."""
    burst = json.loads(line)
    try:
        records = asyncio.run(run_burst(burst["host"], burst["port"], burst["bodies"], burst["timeout_s"]))
    except BurstFailed as failure:
        return {"error": str(failure)}
    return {"records": [asdict(record) for record in records]}


def main() -> None:
    """Answer bursts until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


if __name__ == "__main__":
    main()
