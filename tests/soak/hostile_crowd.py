"""Many hostile clients in a process of their own that gives way to all others.

`python -m tests.soak.hostile_crowd URL KEY KIND COUNT`. Each has one request open at all times: when one is
answered, the next is sent. Says on its standard output how many replies there were of each status, as JSON,
once its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from urllib.parse import urlsplit

from tests.soak.hostile_bodies import CHAT, COMPLETIONS, DETOKENIZE, LARGEST, TOKENIZE

NUM_CLIENTS = 256
SLOW_BYTES, SLOW_S = 1024, 0.05
RETRY_S = 1.0  # after a refusal, as Retry-After asks: a storm of small requests is another attack

Bodies = Iterator[bytes]


def _same(**fields: object) -> Bodies:
    body = json.dumps(fields).encode()
    while True:
        yield body


def _grammars() -> Bodies:
    """Each is another, refused when the compiler has used up what it may, and full of words to its 4 KB."""
    for number in count():
        parts = " & ".join(f"/(.*[a-z]{{{n}}}.*)/" for n in range(8, 16))
        source = f"start: A\nA: {parts}\n// {number} ".ljust(4096, "x")
        yield json.dumps({"prompt": "a", "structured_outputs": {"grammar": source}}).encode()


def _history() -> Bodies:
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "b" * 1000})}}
    turn = {"role": "assistant", "tool_calls": [call]}
    asked = {"role": "user", "content": "hi"}
    return _same(messages=[asked, *[turn] * (LARGEST // 1200), asked], max_tokens=1)


KINDS: dict[str, tuple[str, Callable[[], Bodies]]] = {
    "detokenize": (DETOKENIZE, lambda: _same(tokens=[5] * 10**6)),
    "tokenize": (TOKENIZE, lambda: _same(prompt="the quick, brown fox: " * (LARGEST // 23))),
    "grammars": (COMPLETIONS, _grammars),
    "tool calls": (CHAT, _history),
    "deep": (COMPLETIONS, lambda: iter(lambda: b"[" * (LARGEST - 9), b"")),
    "scores": (
        COMPLETIONS,
        lambda: _same(prompt=list(range(7, 107)), n=128, max_tokens=1, prompt_logprobs=20),
    ),
    "slow uploads": (COMPLETIONS, lambda: _same(prompt="a" * (LARGEST - 100))),
}


class Crowd:
    """Clients of one kind."""

    def __init__(self, url: str, key: str, kind: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._address = parts.hostname, parts.port
        self._key = key
        self._is_slow = kind == "slow uploads"
        self._path, make = KINDS[kind]
        self._bodies = make()
        self.statuses: Counter[int] = Counter()

    async def client(self) -> None:
        """One of them, until it is cancelled; it connects anew for each request, as it is refused often."""
        while True:
            try:
                status = await self._request(next(self._bodies))
            except (OSError, EOFError, ValueError):
                status = 0
            self.statuses[status] += 1
            if status in (0, 503):
                await asyncio.sleep(RETRY_S)

    async def _request(self, body: bytes) -> int:
        """The status of the reply, 0 if there was none."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            head = f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            head += "connection: close\r\n\r\n"
            writer.write(head.encode())
            sending = asyncio.create_task(self._send(writer, body))
            try:
                line = await reader.readline()
                while await reader.read(2**16):
                    pass
            finally:
                sending.cancel()
            return int(line.split()[1]) if line else 0
        finally:
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        step = SLOW_BYTES if self._is_slow else 2**18
        for first in range(0, len(body), step):
            writer.write(body[first : first + step])
            await writer.drain()
            if self._is_slow:
                await asyncio.sleep(SLOW_S)


async def main(url: str, key: str, kind: str, num_clients: int) -> None:
    """Until standard input ends."""
    crowd = Crowd(url, key, kind)
    clients = [asyncio.create_task(crowd.client()) for _ in range(num_clients)]
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    print(json.dumps(crowd.statuses))


if __name__ == "__main__":
    os.nice(19 - os.nice(0))
    url, key, kind, num_clients = sys.argv[1:]
    asyncio.run(main(url, key, kind, int(num_clients)))
