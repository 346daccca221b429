"""GGUF files as they are: our server beside llama.cpp's on the same file, burst by burst in turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from config import load_settings
from tests.bench.contenders import NO_RUN, OURS, Comparison, Contender
from tests.bench.context import BenchContext
from tests.bench.load import HttpSide
from tests.bench.peers import Rate, decode_rate, middle, output_rate, ratios
from tests.bench.processes import HttpChild, JsonWorker, Server, free_port
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed, BurstFigures
from tests.bench.workloads import Words, Workload, prompts_of

LLAMA = "llama.cpp"
MOST_STREAMS = 32
LONGEST_PROMPT = 4096
READY_TIMEOUT_S = 120.0


def prompt_rate(figures: BurstFigures) -> float:
    """Prompts a second up to the first token."""
    return 1e3 / figures.ttft_p50_ms


@dataclass(frozen=True, slots=True)
class Case:
    """Streams at once of so many tokens in and out; `bar` is the least ratio of `rate`, ours over theirs."""

    num_streams: int
    num_prompt_tokens: int
    max_tokens: int
    rate: Rate
    bar: float

    @property
    def name(self) -> str:
        """What it is called in the report."""
        if self.rate is prompt_rate:
            return f"prompt of {self.num_prompt_tokens:,}"
        return f"{self.num_streams} at once"

    def workload(self, words: Words, run: int) -> Workload:
        """Prompts that no other run had."""
        seed = random.Random(f"gguf/{self.name}/{run}").getrandbits(32)
        prompts = prompts_of(words, self.num_streams, self.num_prompt_tokens, seed)
        title = f"{self.num_streams} at once, {self.num_prompt_tokens} in / {self.max_tokens} out"
        return Workload(self.name, title, tuple(prompts), self.max_tokens)


CASES = (
    Case(1, 16, 128, decode_rate, 1.3),
    Case(8, 16, 64, output_rate, 2.5),
    Case(MOST_STREAMS, 16, 32, output_rate, 2.5),
    Case(1, 512, 2, prompt_rate, 1.5),
    Case(1, LONGEST_PROMPT, 2, prompt_rate, 1.5),
)


def run_gguf(context: BenchContext) -> list[Section]:
    """A section with the ratios and the bars for each file of `--gguf`."""
    return [section_of(path, context) for path in context.gguf_files]


def section_of(path: Path, context: BenchContext) -> Section:
    """What both sides do with one file. Raises BenchmarkFailed."""
    flags = (*context.flags, "--model", str(path))
    context = replace(context, flags=flags, settings=load_settings(list(flags)))
    comparison = Comparison()
    with ExitStack() as stack:
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        sides = [open_ours(context, stack, client), open_llama(path, context, stack, client)]
        for case in CASES[1:4]:
            for side in sides:
                side.burst(case.workload(context.words, NO_RUN))
        comparison.run(context, sides, [named(case) for case in CASES])
    if comparison.failures:
        raise BenchmarkFailed(f"{path.name}: {comparison.failures}")
    return compared(path.name, comparison)


def named(case: Case) -> Callable[[Words, int], Workload]:
    """The maker of its workloads."""
    return partial(Case.workload, case)


def open_ours(context: BenchContext, stack: ExitStack, client: JsonWorker) -> Contender:
    """Our server, which drafts nothing."""
    server = stack.enter_context(Server(*context.flags, "--speculative-method", "none"))
    server.wait_ready()
    return Contender(HttpSide(server, client, OURS), server)


def open_llama(path: Path, context: BenchContext, stack: ExitStack, client: JsonWorker) -> Contender:
    """Llama.cpp's, with room for every case and nothing kept of prompts, which would cost it time."""
    port = free_port()
    command = [
        *(str(context.llama_server), "--model", str(path), "--port", str(port), "--threads", "2"),
        *("--parallel", str(MOST_STREAMS), "--ctx-size", str(MOST_STREAMS * (LONGEST_PROMPT + 256))),
        *("--no-kv-unified", "--cache-ram", "0"),
    ]
    try:
        server = stack.enter_context(HttpChild(command, port, "/health"))
    except OSError as error:
        raise BenchmarkFailed(f"{command[0]} cannot be started: {error}") from error
    server.wait_ready(READY_TIMEOUT_S)
    return Contender(HttpSide(server, client, LLAMA), server)


def compared(title: str, comparison: Comparison) -> Section:
    """Both sides' rates, their ratios run by run, and the bars."""
    section = Section("gguf", title)
    for case in CASES:
        for side in (OURS, LLAMA):
            section.add(case.name, *shown(case, side), rates(comparison, side, case))
        ratio = ratios(comparison, OURS, LLAMA, case.name, case.rate)
        section.add(case.name, f"{OURS} / {LLAMA}", "x", ratio)
        section.bars.append(Bar(f"{title}, {case.name}", case.bar, "x", middle(ratio), at_least=True))
    section.notes.append("Of one stream the rate from its first event on, of several the output of all.")
    return section


def shown(case: Case, side: str) -> tuple[str, str]:
    """How a side's rate is called, and its unit."""
    return (f"{side}, to the first token", "ms") if case.rate is prompt_rate else (side, "tokens/s")


def rates(comparison: Comparison, side: str, case: Case) -> Sequence[float]:
    """A side's figure of each run."""
    figures = comparison.figures[side][case.name]
    return [run.ttft_p50_ms if case.rate is prompt_rate else case.rate(run) for run in figures]
