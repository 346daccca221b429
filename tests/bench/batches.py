"""A batch job beside four streams that somebody reads: what the streams lose, and what the batch gets done.

By turns in one server: the batch alone, the streams beside it, the same streams alone: other texts would have
other drafts. Each run has its own job.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import openai

from tests.bench.context import BenchContext
from tests.bench.load import HttpSide, checked_figures
from tests.bench.processes import JsonWorker, Server
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed, BurstFigures
from tests.bench.workloads import Workload, prompts_of

NUM_LINES, LINE_PROMPT_TOKENS, LINE_TOKENS = 2000, 32, 64
NUM_STREAMS, STREAM_TOKENS = 4, 256
IDLE_S = 6.0  # over which the batch's own rate is measured
LOOK_S = 0.05
START_TIMEOUT_S, CANCEL_TIMEOUT_S = 60.0, 60.0
GAP_BAR, RATE_BAR, BACKGROUND_BAR = 1.03, 0.97, 0.40
_GENERATED = re.compile(r"^slipstream_generation_tokens_total\{.*\} (.*)$", re.MULTILINE)
_RUNNING = re.compile(r"^slipstream_batch_lines_running\{.*\} (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One run. Rates are tokens a second."""

    idle_rate: float  # of the batch alone
    background_rate: float  # of the batch beside the streams
    beside: BurstFigures
    alone: BurstFigures


def lines_of(prompts: list[str]) -> bytes:
    """A job of completions of fixed length."""
    common = {"max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**common, "prompt": prompt},
        }
        for number, prompt in enumerate(prompts)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class BatchedServer:
    """A running server with its official client, its bursts, and a look at its counters."""

    def __init__(self, server: Server, worker: JsonWorker) -> None:
        self._url = server.url
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self._http = HttpSide(server, worker)

    def burst(self, workload: Workload) -> BurstFigures:
        """What the streams of a workload looked like to those who read them."""
        return checked_figures(workload, self._http.burst(workload))

    def figure(self, pattern: re.Pattern[str]) -> float:
        """A sample on the page of metrics."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as reply:
            found = pattern.search(reply.read().decode())
        assert found is not None, pattern.pattern
        return float(found[1])

    def submit(self, lines: bytes) -> str:
        """The id of a new batch, some of whose lines run."""
        file = self._client.files.create(file=("lines.jsonl", lines), purpose="batch")
        batch = self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        self._until(lambda: self.figure(_RUNNING) > 0, START_TIMEOUT_S, "no line ran")
        return batch.id

    def cancel(self, batch_id: str) -> None:
        """End a batch; returns when nothing of it runs. Raises BenchmarkFailed if it had ended before."""
        status = self._status(batch_id)
        if status != "in_progress":
            raise BenchmarkFailed(f"the batch is {status} before the streams have ended")
        self._client.batches.cancel(batch_id)
        self._until(lambda: self._status(batch_id) == "cancelled", CANCEL_TIMEOUT_S, "it was not cancelled")

    def _status(self, batch_id: str) -> str:
        return self._client.batches.retrieve(batch_id).status

    def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{what} within {seconds:.0f} s")
            time.sleep(LOOK_S)


def one_turn(server: BatchedServer, context: BenchContext, run: int) -> Turn:
    """The batch alone, beside the streams, and the streams alone."""
    prompts = prompts_of(context.words, NUM_LINES + NUM_STREAMS, LINE_PROMPT_TOKENS, seed=run)
    lines, streams = prompts[:NUM_LINES], tuple(prompts[NUM_LINES:])
    batch_id = server.submit(lines_of([prompt.text for prompt in lines]))
    began, before = time.monotonic(), server.figure(_GENERATED)
    time.sleep(IDLE_S)
    idle_rate = (server.figure(_GENERATED) - before) / (time.monotonic() - began)
    began, before = time.monotonic(), server.figure(_GENERATED)
    workload = Workload("streams", "", streams, STREAM_TOKENS, f"beside {run}")
    beside = server.burst(workload)
    generated = server.figure(_GENERATED) - before - workload.num_output_tokens
    background_rate = generated / (time.monotonic() - began)
    server.cancel(batch_id)
    alone = server.burst(replace(workload, cache_salt=f"alone {run}"))
    return Turn(idle_rate, background_rate, beside, alone)


def run_batches(context: BenchContext) -> list[Section]:
    """The section `batches` with its bars."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="slipstream-batches-")))
        started = stack.enter_context(Server(*context.flags, "--state-dir", str(folder)))
        server = BatchedServer(started, stack.enter_context(JsonWorker("tests.bench.load_client")))
        context.say("waiting for the server")
        started.wait_ready()
        context.say("batches, warm-up")
        one_turn(server, context, -1)
        turns = []
        for run in range(context.runs):
            context.say(f"batches, run {run + 1}/{context.runs}")
            turns.append(one_turn(server, context, run))
    return [section_of(turns)]


def section_of(turns: list[Turn]) -> Section:
    """What the turns say; each ratio is of one turn."""
    title = f"{NUM_LINES} lines of {LINE_TOKENS} tokens beside {NUM_STREAMS} streams of {STREAM_TOKENS}"
    section = Section("batches", title)
    for case, figures in (
        ("streams alone", [turn.alone for turn in turns]),
        ("streams beside", [turn.beside for turn in turns]),
    ):
        section.add(case, "output", "tokens/s", [each.output_tokens_per_s for each in figures])
        section.add(case, "TTFT p99", "ms", [each.ttft_p99_ms for each in figures])
        section.add(case, "inter-token p50", "ms", [each.itl_p50_ms for each in figures])
        section.add(case, "inter-token p99", "ms", [each.itl_p99_ms for each in figures])
    section.add("batch alone", "output", "tokens/s", [turn.idle_rate for turn in turns])
    section.add("batch beside", "output", "tokens/s", [turn.background_rate for turn in turns])
    gaps = [turn.beside.itl_p99_ms / turn.alone.itl_p99_ms for turn in turns]
    rates = [turn.beside.output_tokens_per_s / turn.alone.output_tokens_per_s for turn in turns]
    shares = [turn.background_rate / turn.idle_rate for turn in turns]
    for name, limit, at_least, values in (
        ("streams' inter-token p99", GAP_BAR, False, gaps),
        ("streams' tokens/s", RATE_BAR, True, rates),
        ("batch's tokens/s", BACKGROUND_BAR, True, shares),
    ):
        measured = section.add(name, "beside over alone", "x", values).median
        section.bars.append(Bar(f"{name}, beside over alone", limit, "x", measured, at_least=at_least))
    return section
