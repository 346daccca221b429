"""The load of a soak: a crowd of clients, or arrivals that wait for nobody; a canary that sings all along."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

from tests.e2e.wire import ask
from tests.soak.client import SoakClient
from tests.soak.errands import COMPLETIONS, Errand, Mix
from tests.soak.tally import Tally

THINK_S = 0.1  # mean, between two errands of a client
RETRY_S = 1.0  # the least that a refusal asks for
CANARY_GAP_S = 1.0
QUEUE_S = 600.0  # the longest that anybody may wait in a full queue
_GETS = ("/", "/v1/models", "/version", "/load", "/server_info", "/health/ready", "/tokenizer_info")
_SONGS: tuple[dict[str, Any], ...] = (
    {"prompt": "The quick brown fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 1, "seed": 7, "n": 2},
)


async def crowd(url: str, tally: Tally, num_clients: int, seconds: float, seed: int) -> None:
    """So many clients for so long; each finishes what it is at. Between errands they think a little."""
    until = time.monotonic() + seconds

    async def live(number: int) -> None:
        client, mix = SoakClient(url, tally), Mix(seed * num_clients + number)
        think = random.Random(number)
        try:
            while time.monotonic() < until:
                await client.run(mix.errand())
                await asyncio.sleep(think.expovariate(1 / THINK_S) + RETRY_S * client.was_refused)
        finally:
            await client.close()

    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(live(number))


async def arrivals(url: str, tally: Tally, per_s: float, seconds: float) -> None:
    """Streams that begin at this rate, whether earlier ones have ended or not; returns when all have."""
    body = {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.monotonic()

    async def visit(number: int) -> None:
        prompt = f"{number} times: write about the weather of that day."
        client = SoakClient(url, tally, QUEUE_S)
        try:
            await client.run(
                Errand(COMPLETIONS, json.dumps({**body, "prompt": prompt}).encode(), is_stream=True)
            )
        finally:
            await client.close()

    async with asyncio.TaskGroup() as group:
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(began + number / per_s - time.monotonic())
            group.create_task(visit(number))


class Canary:
    """Asks for the same texts again and again: every one must be what it was the first time, alone."""

    def __init__(self, url: str, tally: Tally) -> None:
        self._url = url
        self._tally = tally
        self._first: dict[int, Any] = {}

    async def sing(self) -> None:
        """All songs once. What does not find room in the queue is left out."""
        for number, song in enumerate(_SONGS):
            self._tally.num_sent += 1
            body = {**song, "return_token_ids": True, "priority": -1000}
            reply = await ask(self._url, "POST", COMPLETIONS, body)
            self._tally.statuses[reply.status] += 1
            if reply.status == 200:
                self._tally.num_canaries += 1
                heard = [choice["token_ids"] for choice in reply.json()["choices"]]
                if heard != self._first.setdefault(number, heard):
                    self._tally.surprise(f"the canary sang {heard}, and {self._first[number]} at first")
            elif reply.status != 503:
                self._tally.surprise(f"{reply.status} for the canary: {reply.body[:200]!r}")

    async def sing_on(self) -> None:
        """Until it is cancelled; and look at every page there is."""
        while True:
            await self.sing()
            for path in _GETS:
                reply = await ask(self._url, "GET", path)
                if reply.status != 200:
                    self._tally.surprise(f"{reply.status} for {path}: {reply.body[:200]!r}")
            await asyncio.sleep(CANARY_GAP_S)
