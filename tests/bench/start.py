"""From `slipstream serve` on an installed machine to its first streamed token."""

from __future__ import annotations

import asyncio
from time import perf_counter

from tests.bench.context import BenchContext
from tests.bench.load_client import run_burst
from tests.bench.processes import Server
from tests.bench.report import Bar, Section
from tests.bench.workloads import prompts_of

BAR_S = 15.0
TIMEOUT_S = 60.0


def start_s(context: BenchContext, seed: int) -> tuple[float, float]:
    """Seconds from starting the process until it was ready, and until its first token had come."""
    prompt = prompts_of(context.words, 1, 16, seed)[0]
    body = {"prompt": prompt.text, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    started = perf_counter()
    with Server(*context.flags) as server:
        server.wait_ready()
        ready = perf_counter()
        records = asyncio.run(run_burst(server.host, server.port, [body], TIMEOUT_S))
    return ready - started, records[0].event_times[0] - started


def run_start(context: BenchContext) -> list[Section]:
    """The section `start` with its bar."""
    section = Section("start", "slipstream serve, installed, model converted")
    runs = []
    for run in range(context.runs):
        context.say(f"start, run {run + 1}/{context.runs}")
        runs.append(start_s(context, run))
    section.add("slipstream serve", "ready", "s", [ready for ready, _ in runs])
    first = section.add("slipstream serve", "first token", "s", [first for _, first in runs])
    section.bars.append(Bar("start to first streamed token", BAR_S, "s", first.median, at_least=False))
    return [section]
