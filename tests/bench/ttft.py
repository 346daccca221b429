"""Time to the first token on an idle server, over HTTP, against one bare prefill of as many tokens."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack

import uvloop

from tests.bench.bare import BareModel
from tests.bench.context import BenchContext
from tests.bench.decode import WARM_UP_STEPS, LoadedEngine, loaded_engine
from tests.bench.load import HttpSide, checked_figures
from tests.bench.processes import JsonWorker, Server
from tests.bench.report import Bar, Section
from tests.bench.workloads import Workload, prompts_of

PROMPT_TOKENS = 128
PAIRS = 20  # of one bare prefill and one request, a run
BAR = 1.3


class TtftRuns:
    """The medians of every run, in milliseconds."""

    def __init__(self) -> None:
        self.bare_ms: list[float] = []
        self.http_ms: list[float] = []

    def add(self, bare_ms: list[float], http_ms: list[float]) -> None:
        """One run's pairs."""
        self.bare_ms.append(statistics.median(bare_ms))
        self.http_ms.append(statistics.median(http_ms))


async def measure(context: BenchContext, http: HttpSide) -> TtftRuns:
    """Bare prefills in this process and requests to the server, in turns."""
    async with loaded_engine(context) as loaded:
        loop, target = asyncio.get_running_loop(), loaded.executors.target
        bare = await loop.run_in_executor(target, prepare(loaded, context))
        await loop.run_in_executor(target, bare.step_s, WARM_UP_STEPS)
        http.burst(one_prompt(context, seed=-1))
        runs = TtftRuns()
        for run in range(context.runs):
            context.say(f"ttft, run {run + 1}/{context.runs}")
            runs.add(*await pairs(context, http, bare, target, run))
    return runs


def prepare(loaded: LoadedEngine, context: BenchContext) -> Callable[[], BareModel]:
    """What makes the bare prefill, on the model's thread."""
    return lambda: BareModel(loaded.parts.runner, context.words.token_ids, 1, 0, PROMPT_TOKENS)


def one_prompt(context: BenchContext, seed: int) -> Workload:
    """A request for one token after a prompt nobody sent before."""
    return Workload("ttft", "", tuple(prompts_of(context.words, 1, PROMPT_TOKENS, seed)), 1)


async def pairs(
    context: BenchContext, http: HttpSide, bare: BareModel, target: Executor, run: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each bare prefill and of each first token of one run."""
    loop = asyncio.get_running_loop()
    bare_ms, http_ms = [], []
    for pair in range(PAIRS):
        bare_ms.append(1e3 * await loop.run_in_executor(target, bare.step_s, 1))
        workload = one_prompt(context, seed=PAIRS * run + pair)
        # Blocks this loop, which has nothing else to do: the client is a process of its own.
        http_ms.append(checked_figures(workload, http.burst(workload)).ttft_p50_ms)
    return bare_ms, http_ms


def run_ttft(context: BenchContext) -> list[Section]:
    """The section `ttft` with its bar."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(*context.flags))
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        server.wait_ready()
        runs = uvloop.run(measure(context, HttpSide(server, client)))
    section = Section("ttft", f"idle server, {PROMPT_TOKENS}-token prompt")
    case = f"median of {PAIRS}"
    section.add(case, "over HTTP", "ms", runs.http_ms)
    section.add(case, "bare prefill", "ms", runs.bare_ms)
    both = zip(runs.http_ms, runs.bare_ms, strict=True)
    ratio = section.add(case, "HTTP / bare", "x", [http / bare for http, bare in both])
    section.bars.append(Bar("TTFT over one bare prefill", BAR, "x", ratio.median, at_least=False))
    return [section]
