"""Speculation on against off: the same engine, the same requests, in turns.

Off is a request that says `speculation: {"enabled": false}`, so both sides share weights, memory and threads.
What is generated is compared token by token where the dtype allows it, and told where it is not equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import uvloop

from engine.loop.engine import Engine
from engine.plan.request import GenerationRequest, SamplingParams, SpeculationOptions
from engine.plan.speculation.length_policy import Candidate, LengthPolicy, StepLoad
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from tests.bench.context import BenchContext
from tests.bench.decode import loaded_engine
from tests.bench.draft_texts import HARBOUR, LIGHTHOUSE, REPORT
from tests.bench.report import Bar, Section

COPY_TOKENS, ORDINARY_TOKENS = 256, 96
COPY_BAR = 5.0
_IDLE_BAR = 0.97  # where drafts are made and none is verified
# Streams at a time, and the requests of a run; the least gain on ordinary text at each temperature.
STREAMS = {1: 20, 8: 40, 32: 96}
ORDINARY_BARS = {
    (1, 0.0): 1.5,
    (1, 0.7): 1.3,
    (8, 0.0): 1.15,
    (8, 0.7): 1.05,
    (32, 0.0): 0.98,
    (32, 0.7): 0.98,
}

REWRITES = (
    f"Rewrite the following text. Keep every word, but change Thomas Hale to Martin Grey.\n\n{HARBOUR}",
    f"Repeat this text word for word, with one change: the keeper is called Amos Field.\n\n{LIGHTHOUSE}",
    f"Copy this text exactly, but write Mill Road instead of Mill Lane.\n\n{REPORT}",
)
QUESTIONS = (
    "Explain why the sky is blue and what happens to its colours at sunset.",
    "Tell me a story about a fox who wanted to learn to swim.",
    "What should I think about before I buy a used bicycle?",
    "How does a steam engine turn heat into motion?",
    "Describe a walk through an old market town in the rain.",
    "Give me some advice for a first day at a new job.",
    "Why do leaves change colour in autumn?",
    "What did people eat in the Middle Ages, and how did they keep it?",
    "Write a short letter of complaint about a late parcel.",
    "Explain what a prime number is and give some examples.",
    "Give me a recipe for tomato soup with numbered steps.",
    "Write a Python class for a bank account.",
    "What should I pack for a week of hiking in the mountains?",
    "How does a lighthouse work, and who looks after it today?",
    "My neighbour's dog barks all night. What can I do about it?",
    "Compare renting a flat with buying one for a young couple.",
    "Why is sea water salty, and why do rivers stay fresh?",
    "Write a poem about an empty railway station.",
    "How do I ask my manager for a pay rise?",
    "Write a Python function that finds the longest word in a sentence.",
)


@dataclass
class Case:
    """Requests that are sent one after another's end, and what both sides took for them, a figure a run."""

    name: str
    prompts: Sequence[list[int]]
    max_tokens: int
    temperature: float
    bar: float
    num_streams: int = 1  # how many of the requests are open at a time
    off: list[float] = field(default_factory=list)  # tokens/s
    on: list[float] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    replies: list[list[int]] = field(default_factory=list)  # the newest
    num_unequal: int = 0  # replies of which both sides gave another text

    async def run(self, engine: Engine, number: int) -> None:
        """Off then on, or on then off, by turns."""
        texts = {}
        for enabled in (False, True) if number % 2 else (True, False):
            rate = await self.rate(engine, number, enabled=enabled)
            (self.on if enabled else self.off).append(rate)
            texts[enabled] = self.replies
        self.num_unequal += sum(a != b for a, b in zip(texts[False], texts[True], strict=True))

    async def rate(self, engine: Engine, number: int, *, enabled: bool) -> float:
        """Tokens a second of one side; `replies` are what it said."""
        seats = asyncio.Semaphore(self.num_streams)

        async def reply(index: int) -> list[int]:
            async with seats:
                return await self._reply(engine, index, number, enabled)

        started = perf_counter()
        self.replies = await asyncio.gather(*map(reply, range(len(self.prompts))))
        return sum(map(len, self.replies)) / (perf_counter() - started)

    async def _reply(self, engine: Engine, index: int, number: int, enabled: bool) -> list[int]:
        sampling = SamplingParams(
            max_tokens=self._num_tokens(index),
            temperature=self.temperature,
            seed=1000 * number + index,
            ignore_eos=self.temperature > 0,  # ordinary text: as many tokens on both sides
        )
        options = SpeculationOptions(enabled=enabled)
        name = f"{self.name}-{number}-{index}-{enabled}"
        stream = engine.submit(
            GenerationRequest(name, self.prompts[index], sampling, cache_salt=name, speculation=options)
        )
        token_ids: list[int] = []
        async for delta in stream:
            token_ids += delta.token_ids
            if delta.finish is not None and delta.finish.speculation is not None:
                self.stats.add(delta.finish.speculation)
        return token_ids

    def _num_tokens(self, index: int) -> int:
        """Replies beside each other are of many lengths around `max_tokens`, as users' are.

        Replies of one length end together where nothing is drafted, and only there: the next prompts would be
        read in one pass on that side alone.
        """
        return self.max_tokens if self.num_streams == 1 else self.max_tokens * (8 + 5 * index % 9) // 12

    @property
    def tokens_a_round(self) -> float:
        """Tokens that a round commits; 0 before the first."""
        return self.stats.num_committed / max(1, self.stats.num_rounds)

    def newest(self) -> str:
        """Of the newest run, in words."""
        on, off = self.on[-1], self.off[-1]
        return f"{self.name}: {on:.1f} tokens/s over {off:.1f} is {on / off:.2f}"

    def ratios(self) -> tuple[float, ...]:
        """On over off, run by run."""
        return tuple(on / off for on, off in zip(self.on, self.off, strict=True))


class NoDrafts:
    """A length policy that has everything drafted and nothing verified: what speculation costs at g = 0."""

    def __init__(self, policy: LengthPolicy) -> None:
        self._policy = policy

    def lengths(self, candidates: Sequence[Candidate], load: StepLoad) -> list[int]:
        """None of any."""
        return [0] * len(candidates)

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)


async def cases_of(engine: Engine) -> list[Case]:
    """Copying one stream at a time, and ordinary text with each number of streams."""
    rewrites = [await engine.text.render_chat([{"role": "user", "content": text}]) for text in REWRITES]
    questions = [await engine.text.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    cases = [
        Case(f"rewrite {number}", [prompt], COPY_TOKENS, 0.0, COPY_BAR)
        for number, prompt in enumerate(rewrites, 1)
    ]
    for (streams, temperature), bar in ORDINARY_BARS.items():
        prompts = [questions[i % len(questions)] for i in range(STREAMS[streams])]
        name = f"ordinary text, {streams} streams, T {temperature:g}"
        cases.append(Case(name, prompts, ORDINARY_TOKENS, temperature, bar, streams))
    return cases


async def measure(context: BenchContext) -> tuple[list[Case], list[Case]]:
    """The cases with drafts as the settings have it, and the ordinary ones with none ever verified."""
    async with loaded_engine(context) as loaded:
        decoder = loaded.parts.batcher.decoder
        cases = await cases_of(loaded.engine)
        idle = [
            Case(c.name, c.prompts, c.max_tokens, c.temperature, _IDLE_BAR, c.num_streams)
            for c in cases[len(REWRITES) :]
        ]
        for run in range(-1, context.runs):  # the first is not counted: costs and rates are learnt
            for case in cases:
                await case.run(loaded.engine, run + 1)
                context.say(f"speculation, run {run + 1}/{context.runs}, {case.newest()}")
            with_no_drafts(decoder, True)
            for case in idle:
                await case.run(loaded.engine, run + 1)
                context.say(f"speculation at g = 0, run {run + 1}/{context.runs}, {case.newest()}")
            with_no_drafts(decoder, False)
        for case in (*cases, *idle):
            del case.on[0], case.off[0]
        return cases, idle


def with_no_drafts(decoder: SpeculativeDecoder, on: bool) -> None:
    """Have drafts made and not verified, or as it was."""
    policy = decoder._policy
    decoder._policy = NoDrafts(policy) if on else policy._policy  # type: ignore[assignment,attr-defined]


def run_speculation(context: BenchContext) -> list[Section]:
    """The sections of the benchmark `speculation`, with a bar for each case."""
    cases, idle = uvloop.run(measure(context))
    dtype = (
        "Replies that differ do so by rounding: a verified row is computed in another shape than a decode."
    )
    return [
        section_of("speculation", "drafts as the settings have it, against none", cases, dtype),
        section_of("speculation g = 0", "drafted but nothing verified, against none", idle, dtype),
    ]


def section_of(name: str, title: str, cases: Sequence[Case], note: str) -> Section:
    """Rates, ratios, acceptance; a bar for each case."""
    section = Section(name, title, notes=[note])
    for case in cases:
        section.add(case.name, "off", "tokens/s", case.off)
        section.add(case.name, "on", "tokens/s", case.on)
        ratios = section.add(case.name, "on / off", "", case.ratios())
        section.add(case.name, "tokens a round", "", [case.tokens_a_round])
        section.add(case.name, "acceptance", "", [case.stats.acceptance_rate])
        section.add(case.name, "replies that differ", "", [case.num_unequal])
        section.bars.append(Bar(f"{name}: {case.name}", case.bar, "x", ratios.median, at_least=True))
    return section
