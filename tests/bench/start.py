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
READY_BAR_S = 6.0
CASES: dict[str, tuple[str, ...]] = {"slipstream serve": (), "--compile off": ("--compile", "off")}
TIMEOUT_S = 60.0


def start_s(context: BenchContext, flags: tuple[str, ...], seed: int) -> tuple[float, float]:
    """Seconds from starting the process until it was ready, and until its first token had come."""
    prompt = prompts_of(context.words, 1, 16, seed)[0]
    body = {"prompt": prompt.text, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    started = perf_counter()
    with Server(*context.flags, *flags) as server:
        server.wait_ready()
        ready = perf_counter()
        records = asyncio.run(run_burst(server.host, server.port, [body], TIMEOUT_S))
    return ready - started, records[0].event_times[0] - started


def run_start(context: BenchContext) -> list[Section]:
    """The section `start` with its bars."""
    section = Section("start", "slipstream serve, installed, model converted")
    runs: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for run in range(context.runs):
        for case, flags in CASES.items():
            context.say(f"start, {case}, run {run + 1}/{context.runs}")
            runs[case].append(start_s(context, flags, run))
    for case, times in runs.items():
        ready = section.add(case, "ready", "s", [ready for ready, _ in times])
        first = section.add(case, "first token", "s", [first for _, first in times])
        section.bars.append(Bar(f"{case}: ready", READY_BAR_S, "s", ready.median, at_least=False))
        section.bars.append(Bar(f"{case}: first streamed token", BAR_S, "s", first.median, at_least=False))
    return [section]
