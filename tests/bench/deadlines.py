"""Deadlines around and above capacity: earliest first with refusal, against first come, first served.

Two kinds of chat, short questions and passages to be summed up, come at random; each has a deadline between
tight and loose times what its kind takes alone. Replies end by themselves or at `max_tokens`.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import openai

from tests.bench.context import BenchContext
from tests.bench.draft_texts import HARBOUR, LIGHTHOUSE, REPORT
from tests.bench.processes import Server
from tests.bench.report import Bar, Section
from tests.bench.speculation import QUESTIONS

LOADS = (0.8, 1.0, 1.25, 1.5)
SECONDS = 40.0  # of arrivals, at each load on each side
CAPACITY_S, CLIENTS = 20.0, 16
SEATS = 8
TIGHT, LOOSE = 1.5, 8.0  # times what a kind takes alone
NUM_ALONE = 6
LEAD_BAR, WASTE_BAR, WRONG_BAR = 10.0, 3.0, 5.0  # points; % of tokens; % of chats
_GENERATED = re.compile(r"^slipstream_generation_tokens_total\{.*\} (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kind:
    """Chats that are alike; `share` of all are of this kind."""

    texts: tuple[str, ...]
    max_tokens: int
    share: float


KINDS = (
    Kind(tuple(QUESTIONS), 64, 0.7),
    Kind(tuple(f"Sum up what follows.\n\n{text}" for text in (HARBOUR, LIGHTHOUSE, REPORT)), 256, 0.3),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chat that is sent `at_s` seconds after the first may have been."""

    at_s: float
    kind: Kind
    text: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`num_tokens` is 0 for a chat that was refused or cut off, of which `is_refused` is the former."""

    is_in_time: bool
    num_tokens: int
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What became of all chats of one load on one side."""

    outcomes: Sequence[Outcome]
    num_generated: float

    @property
    def percent_in_time(self) -> float:
        """Of all that were sent."""
        return 100 * sum(outcome.is_in_time for outcome in self.outcomes) / len(self.outcomes)

    @property
    def percent_refused(self) -> float:
        """Of all that were sent."""
        return 100 * sum(outcome.is_refused for outcome in self.outcomes) / len(self.outcomes)

    @property
    def percent_wasted(self) -> float:
        """Of the tokens that were generated."""
        used = sum(outcome.num_tokens for outcome in self.outcomes if outcome.is_in_time)
        return 100 * (1 - used / self.num_generated) if self.num_generated else 0.0


def arrivals_at(rate: float, alone_s: dict[Kind, float], seed: int) -> list[Arrival]:
    """A Poisson process; the same chats whatever the rate."""
    rng = random.Random(seed)
    drawn, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(1.0) / rate) < SECONDS:
        kind = rng.choices(KINDS, [each.share for each in KINDS])[0]
        drawn.append(Arrival(at_s, kind, rng.choice(kind.texts), rng.uniform(TIGHT, LOOSE) * alone_s[kind]))
    return drawn


class DeadlineServer:
    """A running server that is asked for chats; with `keeps_deadlines` it is told of theirs."""

    def __init__(self, server: Server, model: str, *, keeps_deadlines: bool) -> None:
        self._url = server.url
        self._model = model
        self._keeps_deadlines = keeps_deadlines

    async def ask(self, client: openai.AsyncOpenAI, arrival: Arrival) -> Outcome:
        """One chat, from now on."""
        extra: dict[str, Any] = {}
        if self._keeps_deadlines:
            extra["deadline_ms"] = round(1000 * arrival.deadline_s)
        began = time.monotonic()
        try:
            reply = await client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": arrival.text}],
                max_tokens=arrival.kind.max_tokens,
                temperature=0.7,
                extra_body=extra,
            )
        except openai.APIStatusError as error:
            return Outcome(False, 0, "x-estimated-completion-ms" in error.response.headers)
        assert reply.usage is not None
        return Outcome(time.monotonic() - began <= arrival.deadline_s, reply.usage.completion_tokens)

    def turn(self, arrivals: Sequence[Arrival]) -> Turn:
        """All of them in their time, and whatever that takes to end."""
        before = self._num_generated()
        outcomes = asyncio.run(self._send(arrivals))
        return Turn(outcomes, self._num_generated() - before)

    async def _send(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        began = time.monotonic()

        async def send(arrival: Arrival) -> Outcome:
            await asyncio.sleep(began + arrival.at_s - time.monotonic())
            return await self.ask(client, arrival)

        async with self._client() as client:
            return await asyncio.gather(*map(send, arrivals))

    def alone_s(self, kind: Kind, seed: int) -> float:
        """Median seconds of such a chat on an idle server."""
        rng = random.Random(seed)
        times = []
        for _ in range(NUM_ALONE):
            began = time.monotonic()
            asyncio.run(self._send([Arrival(0.0, kind, rng.choice(kind.texts), 1e6)]))
            times.append(time.monotonic() - began)
        return statistics.median(times)

    def capacity(self, seed: int) -> float:
        """Chats a second while there are always more of them than seats."""
        return asyncio.run(self._capacity(random.Random(seed)))

    async def _capacity(self, rng: random.Random) -> float:
        began, num_ended = time.monotonic(), 0

        async def keep_asking() -> None:
            nonlocal num_ended
            while time.monotonic() - began < CAPACITY_S:
                kind = rng.choices(KINDS, [each.share for each in KINDS])[0]
                await self.ask(client, Arrival(0.0, kind, rng.choice(kind.texts), 1e6))
                num_ended += time.monotonic() - began < CAPACITY_S

        async with self._client() as client:
            await asyncio.gather(*(keep_asking() for _ in range(CLIENTS)))
        return num_ended / CAPACITY_S

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0)

    def _num_generated(self) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as reply:
            found = _GENERATED.search(reply.read().decode())
        assert found is not None
        return float(found[1])


def run_deadlines(context: BenchContext) -> list[Section]:
    """The section `deadlines` with its bars; one run, since it is long."""
    seats, model = ("--max-num-seqs", str(SEATS)), context.settings.model.served_names[0]
    with ExitStack() as stack:
        plain = stack.enter_context(Server(*context.flags, *seats, "--scheduling-policy", "fcfs"))
        plain.wait_ready()
        keeping = stack.enter_context(Server(*context.flags, *seats, "--scheduling-policy", "deadline"))
        keeping.wait_ready()
        sides = {
            "fcfs": DeadlineServer(plain, model, keeps_deadlines=False),
            "deadline": DeadlineServer(keeping, model, keeps_deadlines=True),
        }
        context.say("deadlines, capacity")
        rates = [side.capacity(seed=1) for side in sides.values()]  # and each learns its rates and lengths
        alone_s = {kind: sides["fcfs"].alone_s(kind, seed=2) for kind in KINDS}
        section = Section(
            "deadlines",
            f"{SEATS} seats, {max(rates):.2f} chats a second at most, alone "
            f"{' and '.join(f'{seconds:.2f} s' for seconds in alone_s.values())}",
        )
        leads, wastes, wrongs = [], [], []
        for number, load in enumerate(LOADS):
            turns = {}
            for name, side in sides.items():
                context.say(f"deadlines, load {load:.0%}, {name}")
                turns[name] = side.turn(arrivals_at(load * max(rates), alone_s, seed=3 + number))
                add_turn(section, f"load {load:.0%}, {name}", turns[name])
            leads.append(turns["deadline"].percent_in_time - turns["fcfs"].percent_in_time)
            wastes.append(turns["deadline"].percent_wasted)
            wrongs.append(percent_wrong(turns["deadline"], turns["fcfs"]))
            section.add(f"load {load:.0%}, deadline", "refused, in time by fcfs", "%", [wrongs[-1]])
    section.bars += [
        Bar("deadlines met, ahead of fcfs by at the least", LEAD_BAR, "points", min(leads), at_least=True),
        Bar("tokens spent on chats that miss, at the most", WASTE_BAR, "%", max(wastes), at_least=False),
        Bar("refused though fcfs had them in time, at the most", WRONG_BAR, "%", max(wrongs), at_least=False),
    ]
    return [section]


def percent_wrong(refusing: Turn, other: Turn) -> float:
    """Of all chats, those that one side refused and the other, asked for the same ones, had in time."""
    pairs = zip(refusing.outcomes, other.outcomes, strict=True)
    wrong = sum(outcome.is_refused and twin.is_in_time for outcome, twin in pairs)
    return 100 * wrong / len(refusing.outcomes)


def add_turn(section: Section, case: str, turn: Turn) -> None:
    """The figures of one side at one load."""
    section.add(case, "in time", "%", [turn.percent_in_time])
    section.add(case, "refused", "%", [turn.percent_refused])
    section.add(case, "wasted", "% of tokens", [turn.percent_wasted])
    section.add(case, "chats", "", [float(len(turn.outcomes))])
