"""A program that reads many completion streams at once: `sse_reader.py URL STREAMS TOKENS [PER_SECOND]`.

A process of its own, so that its work is none of the server's. Stream i asks for a text that only it can get.
PER_SECOND streams open a second, all at once without it. Prints one JSON object: how many streams came whole,
how many events, and what was wrong with the first bad one. Needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Found:
    """What the program saw."""

    whole: int
    events: int
    first_fault: str | None


async def read_streams(url: str, num_streams: int, num_tokens: int, per_second: int | None = None) -> Found:
    """Run the program."""
    numbers = [num_streams, num_tokens, *([] if per_second is None else [per_second])]
    program = await asyncio.create_subprocess_exec(
        sys.executable, __file__, url, *map(str, numbers), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await program.communicate()
    return Found(**json.loads(output))


@contextmanager
def room_for_sockets(number: int) -> Iterator[None]:
    """Let this process and the program open so many files, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(number, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def prompt_of(number: int) -> str:
    """What stream `number` says, over and over."""
    return f"{number:04d} says Grüße. "


async def read_stream(url: str, number: int, num_tokens: int, delay_s: float) -> bytes:
    """The whole reply as it came, head and chunk sizes included."""
    parts = urlsplit(url)
    body = json.dumps(
        {"prompt": prompt_of(number), "max_tokens": num_tokens, "temperature": 0, "stream": True}
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await asyncio.sleep(delay_s)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write((head + body).encode())
    received = []
    while data := await reader.read(1 << 16):
        received.append(data)
    writer.close()
    return b"".join(received)


def events_in(reply: bytes) -> list[str]:
    """What stands behind each `data: ` of a chunked reply that writes each event as one chunk."""
    return [line[6:].decode() for line in reply.split(b"\r\n") if line.startswith(b"data: ")]


def fault_in(reply: bytes, number: int, num_tokens: int) -> str | None:
    """What is wrong with a reply, None if nothing is."""
    events = [event.removesuffix("\n\n") for event in events_in(reply)]
    if not reply.startswith(b"HTTP/1.1 200 ") or events[-1:] != ["[DONE]"]:
        return f"stream {number}: not whole: {reply[:100]!r} ... {reply[-100:]!r}"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    prompt = prompt_of(number)
    wanted = (prompt * (num_tokens // len(prompt) + 1))[:num_tokens]
    if (text := "".join(choice["text"] for choice in choices)) != wanted:
        return f"stream {number}: {text[:100]!r}"
    return None if choices[-1]["finish_reason"] == "length" else f"stream {number}: {choices[-1]}"


async def main(url: str, num_streams: int, num_tokens: int, per_second: float = float("inf")) -> None:
    """Read all streams, then look at them."""
    replies = await asyncio.gather(
        *(read_stream(url, number, num_tokens, number / per_second) for number in range(num_streams))
    )
    faults = [fault_in(reply, number, num_tokens) for number, reply in enumerate(replies)]
    bad = [fault for fault in faults if fault]
    num_events = sum(reply.count(b"data: ") for reply in replies)
    print(
        json.dumps(
            {"whole": num_streams - len(bad), "events": num_events, "first_fault": bad[0] if bad else None}
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
