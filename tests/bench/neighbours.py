"""Decoding beside processes that take cores: what is left of an idle machine's rate, and the longest step."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import ExitStack

from engine.startup.cpu_limit import usable_cores
from tests.bench.context import BenchContext
from tests.bench.load import HttpSide, checked_figures
from tests.bench.processes import Child, JsonWorker, Server
from tests.bench.report import Bar, Section
from tests.bench.streams import gaps_of, percentile
from tests.bench.workloads import Workload, prompts_of

STREAMS = (1, 8)
PROMPT_TOKENS, MAX_TOKENS = 64, 384
LONGEST_BAR = 10.0  # median steps
SPINNING = (sys.executable, "-c", "while True: pass")


def run_neighbours(context: BenchContext) -> list[Section]:
    """The section `neighbours` with its bars: nobody, one process that spins, and one for each core."""
    cores = usable_cores()
    bars = {1: 0.45, cores: 0.25}  # of the idle rate
    rates: dict[tuple[int, int], list[float]] = defaultdict(list)
    longest: dict[tuple[int, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        flags = ("--no-prefix-caching", "--speculative-method", "none")
        server = stack.enter_context(Server(*context.flags, *flags))
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        server.wait_ready()
        side = HttpSide(server, client)
        for run in range(context.runs):
            for num_streams in STREAMS:
                prompts = tuple(prompts_of(context.words, num_streams, PROMPT_TOKENS, seed=run))
                workload = Workload("neighbours", "", prompts, MAX_TOKENS)
                for busy in (0, *bars):
                    context.say(f"neighbours, run {run + 1}/{context.runs}, {num_streams} streams, {busy}")
                    with ExitStack() as neighbours:
                        for _ in range(busy):
                            neighbours.enter_context(Child(SPINNING, piped=False))
                        records = side.burst(workload)
                    rates[num_streams, busy].append(checked_figures(workload, records).decode_tokens_per_s)
                    gaps = [gap for record in records for gap in gaps_of(record.event_times)]
                    longest[num_streams, busy].append(max(gaps) / percentile(gaps, 50))
    section = Section("neighbours", f"{cores} cores, drafts off, {MAX_TOKENS} tokens a stream")
    for num_streams in STREAMS:
        for busy in (0, *bars):
            case = f"{num_streams} streams, {busy} cores busy"
            section.add(case, "a stream", "tokens/s", rates[num_streams, busy])
            gap = section.add(case, "longest step / median", "x", longest[num_streams, busy])
            if not busy:
                continue
            pairs = zip(rates[num_streams, busy], rates[num_streams, 0], strict=True)
            ratio = section.add(case, "over idle", "x", [some / idle for some, idle in pairs])
            section.bars.append(Bar(f"{case}, over idle", bars[busy], "x", ratio.median, at_least=True))
            name = f"{case}, longest step over the median"
            section.bars.append(Bar(name, LONGEST_BAR, "x", gap.median, at_least=False))
    return [section]
