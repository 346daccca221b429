"""Prompts that begin alike, on a model with recurrent state: time to the first token, warm over cold.

Cold requests are the same with a salt of their own each, so that both sides share weights, memory, threads
and the work of saving states. One after another, the warm ones come after one that is not counted; those that
come together find nothing at first, and wait for the first of them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass, field
from time import perf_counter

from engine.loop.engine import Engine
from engine.plan.request import GenerationRequest, SamplingParams, SpeculationOptions
from tests.bench.report import Bar, Section
from tests.support.tiny_models import VOCAB_SIZE

NUM_REQUESTS = 16
SHARED_TOKENS = 512
OWN_TOKENS = 32
BAR = 0.5
_PLAIN = SpeculationOptions(enabled=False)


@dataclass
class PrefixCase:
    """Milliseconds to the first token of each side, the median of its requests in each run."""

    name: str
    is_together: bool
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)  # tokens found, of the warm requests of the last run

    async def run(self, engine: Engine, number: int) -> None:
        """Cold then warm, or warm then cold, by turns."""
        for is_warm in (False, True) if number % 2 else (True, False):
            await self._side(engine, number, is_warm=is_warm)

    async def _side(self, engine: Engine, number: int, *, is_warm: bool) -> None:
        draw = random.Random(number)
        shared = draw.choices(range(3, VOCAB_SIZE), k=SHARED_TOKENS)
        requests = []
        for index in range(-1, NUM_REQUESTS):
            name = f"{self.name}-{number}-{is_warm}-{index}"
            own = draw.choices(range(3, VOCAB_SIZE), k=OWN_TOKENS)
            salt = f"{self.name}-{number}" if is_warm else name
            sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            requests.append(
                GenerationRequest(name, [*shared, *own], sampling, cache_salt=salt, speculation=_PLAIN)
            )
        if self.is_together:
            figures = await asyncio.gather(*(first_token(engine, request) for request in requests[1:]))
        else:
            figures = [await first_token(engine, request) for request in requests][1:]
        times, cached = zip(*figures, strict=True)
        (self.warm if is_warm else self.cold).append(1e3 * statistics.median(times))
        if is_warm:
            self.num_cached = list(cached)


async def first_token(engine: Engine, request: GenerationRequest) -> tuple[float, int]:
    """Seconds to a request's first token, and how many tokens of its prompt were found. It ends first."""
    began = perf_counter()
    first_s, num_cached = 0.0, 0
    async for delta in engine.submit(request):
        if delta.token_ids and not first_s:
            first_s = perf_counter() - began
        if delta.finish is not None:
            num_cached = delta.finish.num_cached_tokens
    return first_s, num_cached


def prefix_cases() -> list[PrefixCase]:
    """One after another, and all at once."""
    return [PrefixCase("one after another", False), PrefixCase("all at once", True)]


def prefix_section(cases: list[PrefixCase]) -> Section:
    """The figures of both sides, with a bar for each case."""
    section = Section(
        "hybrid prefix",
        f"{NUM_REQUESTS} requests that share {SHARED_TOKENS} of {SHARED_TOKENS + OWN_TOKENS} tokens, "
        "on a model with recurrent state",
    )
    for case in cases:
        section.add(case.name, "cold TTFT", "ms", case.cold)
        section.add(case.name, "warm TTFT", "ms", case.warm)
        ratios = section.add(
            case.name, "warm / cold", "", [w / c for w, c in zip(case.warm, case.cold, strict=True)]
        )
        section.bars.append(Bar(f"{case.name}: TTFT warm / cold", BAR, "x", ratios.median, at_least=False))
        section.notes.append(f"{case.name}: {sorted(case.num_cached)} tokens found")
    return section
