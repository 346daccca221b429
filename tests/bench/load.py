"""Served load: W1 to W4 over HTTP against `slipstream serve`; W1 to W3 through `generate_batch`, too.

Both sides take turns, burst by burst with the same prompts, while the other one idles.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from tests.bench.context import BenchContext
from tests.bench.processes import JsonWorker, NoAnswer, Server
from tests.bench.report import Bar, Section
from tests.bench.streams import BenchmarkFailed, BurstFigures, StreamRecord
from tests.bench.workloads import (
    Words,
    Workload,
    eight_streams,
    mixed_lengths,
    one_stream,
    prompts_of,
    shared_prefix,
)

HTTP_TIMEOUT_S = 300.0
TIME_BOX_S = {"W1": 60.0, "W2": 60.0, "W3": 180.0}  # for transformers; a burst that takes longer is stopped
WARM_UP_TIMEOUT_S = 120.0
BAR_WORKLOADS = ("W2", "W3")
BAR_RATIO = 2.0
GAP_BAR_MS = 250.0


class WrongOutput(BenchmarkFailed):
    """A side did not take the prompts or generate the lengths it was given: nothing it did counts."""


class Side(Protocol):
    """Something that serves bursts. `burst` is None when the workload ran out of its time box."""

    name: str

    def burst(self, workload: Workload) -> list[StreamRecord] | None:
        """Send all prompts at once and wait for the end of every one."""
        ...


class Address(Protocol):
    """Where a server listens."""

    @property
    def host(self) -> str:
        """Name or number."""
        ...

    @property
    def port(self) -> int:
        """1 to 65535."""
        ...


class HttpSide:
    """A running server, asked over HTTP by the load client in a process of its own."""

    def __init__(self, server: Address, client: JsonWorker, name: str = "slipstream") -> None:
        self.name = name
        self._server = server
        self._client = client

    def burst(self, workload: Workload) -> list[StreamRecord]:
        """Greedy streams that ignore EOS; raises ChildFailed when one is refused or breaks off."""
        common: dict[str, object] = {"max_tokens": workload.max_tokens, "temperature": 0, "ignore_eos": True}
        if workload.cache_salt is not None:
            common["cache_salt"] = workload.cache_salt
        question = {
            "host": self._server.host,
            "port": self._server.port,
            "bodies": [{**common, "prompt": prompt.text} for prompt in workload.prompts],
            "timeout_s": HTTP_TIMEOUT_S,
        }
        answer = self._client.ask(question, HTTP_TIMEOUT_S + 10)
        return [StreamRecord.from_json(record) for record in answer["records"]]


class TransformersSide:
    """transformers in a worker; a workload that ran out of its time box once is not tried again."""

    name = "transformers"

    def __init__(self, context: BenchContext) -> None:
        self._context = context
        self._worker: JsonWorker | None = None
        self.unfinished: set[str] = set()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        directory = str(self._context.model_directory)
        self._worker = JsonWorker("tests.bench.transformers_worker", directory)
        self._worker.__enter__()
        prompts = prompts_of(self._context.words, 2, 64, seed=0)
        self._ask(Workload("warm-up", "", tuple(prompts), 8), WARM_UP_TIMEOUT_S)

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.__exit__(None, None, None)
            self._worker = None

    def _ask(self, workload: Workload, timeout_s: float) -> list[StreamRecord]:
        assert self._worker is not None
        prompts = [prompt.token_ids for prompt in workload.prompts]
        answer = self._worker.ask({"prompts": prompts, "max_tokens": workload.max_tokens}, timeout_s)
        return [StreamRecord.from_json(record) for record in answer["records"]]

    def burst(self, workload: Workload) -> list[StreamRecord] | None:
        """Raises ChildFailed when transformers fails."""
        if workload.name in self.unfinished:
            return None
        try:
            return self._ask(workload, TIME_BOX_S[workload.name])
        except NoAnswer:
            self.unfinished.add(workload.name)
            self._stop()
            self._start()
            return None


def workloads_of_run(words: Words, seed: int, *, cached: bool) -> Iterator[Workload]:
    """The workloads of one run; `cached` adds W4. Every run has prompts of its own."""
    yield one_stream(words, seed)
    yield eight_streams(words, seed)
    yield mixed_lengths(words, seed)
    if cached:
        yield shared_prefix(words, seed, warm=False)
        yield shared_prefix(words, seed, warm=True)


def checked_figures(workload: Workload, records: Sequence[StreamRecord]) -> BurstFigures:
    """The figures of a burst, after making sure that the work was the work asked for. Raises WrongOutput."""
    asked = [(len(prompt.token_ids), workload.max_tokens) for prompt in workload.prompts]
    done = [(record.num_prompt_tokens, record.num_output_tokens) for record in records]
    if done != asked:
        raise WrongOutput(f"{workload.name}: asked for (prompt, output) tokens {asked}, got {done}")
    return BurstFigures.of(records)


Figures = dict[str, dict[str, list[BurstFigures]]]  # side -> workload -> one entry a finished run


Ran = dict[str, Workload]  # by name, in order, as the last run had them


def measure(context: BenchContext, sides: Sequence[Side], *, cached: bool) -> tuple[Figures, Ran]:
    """Run every workload on every side, `context.runs` times; W4 on the first side only."""
    figures: Figures = {side.name: {} for side in sides}
    ran: Ran = {}
    for run in range(context.runs):
        for workload in workloads_of_run(context.words, seed=run, cached=cached):
            ran[workload.name] = workload
            for side in sides:
                if workload.name.startswith("W4") and side is not sides[0]:
                    continue
                context.say(f"{workload.name} {side.name}, run {run + 1}/{context.runs}")
                finished = figures[side.name].setdefault(workload.name, [])
                records = side.burst(workload)
                if records is not None:
                    finished.append(checked_figures(workload, records))
    return figures, ran


def section_of(side: str, figures: dict[str, list[BurstFigures]], ran: Ran) -> Section:
    """One side's figures as a section, each workload spelled out in a note."""
    section = Section(side, "served load")
    for name, runs in figures.items():
        section.add(name, "output", "tokens/s", [run.output_tokens_per_s for run in runs])
        section.add(name, "decode", "tokens/s", [run.decode_tokens_per_s for run in runs])
        section.add(name, "TTFT p50", "ms", [run.ttft_p50_ms for run in runs])
        section.add(name, "TTFT p99", "ms", [run.ttft_p99_ms for run in runs])
        section.add(name, "inter-token p50", "ms", [run.itl_p50_ms for run in runs])
        section.add(name, "inter-token p99", "ms", [run.itl_p99_ms for run in runs])
        section.add(name, "per event", "tokens", [run.tokens_per_event for run in runs])
        if name.startswith("W4"):
            section.add(name, "cached", "tokens", [run.cached_tokens for run in runs])
        section.notes.append(f"{name}: {ran[name].title}")
    return section


def ratio_bars(ours: Section, theirs: Section, ran: Ran) -> list[Bar]:
    """Our output rate over theirs; a side that ran out of its time box gives a lower bound of the ratio."""
    output = {
        (s.name, m.case): m.median for s in (ours, theirs) for m in s.measurements if m.quantity == "output"
    }
    bars = []
    for name in BAR_WORKLOADS:
        our_rate, their_rate = output[ours.name, name], output[theirs.name, name]
        bound_only = their_rate is None
        if their_rate is None:
            their_rate = ran[name].num_output_tokens / TIME_BOX_S[name]  # they gave fewer
        ratio = None if our_rate is None else our_rate / their_rate
        bar = f"{name} output rate over transformers' generate_batch"
        bars.append(Bar(bar, BAR_RATIO, "x", ratio, at_least=True, bound_only=bound_only))
    return bars


def gap_bar(runs: Sequence[BurstFigures]) -> Bar:
    """How long a stream of W3 goes without an event: what chunked prompts are for."""
    gap_ms = statistics.median(run.itl_p99_ms for run in runs)
    return Bar("W3 inter-token p99", GAP_BAR_MS, "ms", gap_ms, at_least=False)


def run_load(context: BenchContext, *, served: bool, peer: bool) -> list[Section]:
    """The sections `served` (with W4 when asked for) and, with `peer`, `transformers` and its bars."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(*context.flags))
        client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        http = HttpSide(server, client)
        sides: list[Side] = [http]
        if peer:
            sides.append(stack.enter_context(TransformersSide(context)))
        context.say("waiting for the server")
        server.wait_ready()
        http.burst(Workload("warm-up", "", tuple(prompts_of(context.words, 2, 64, seed=0)), 8))
        figures, ran = measure(context, sides, cached=served)
    ours = section_of("served", figures["slipstream"], ran)
    ours.title = "slipstream serve over HTTP"
    ours.bars.append(gap_bar(figures["slipstream"]["W3"]))
    ours.notes.append(
        "TTFT runs from writing the request, on an open connection, to the first event with text."
    )
    if not peer:
        return [ours]
    theirs = section_of("transformers", figures["transformers"], ran)
    theirs.title = "transformers' generate_batch in a process of its own, same prompts, in turns with ours"
    theirs.notes.append("No HTTP, no text: times are noted inside transformers, set-up left out.")
    theirs.bars = ratio_bars(ours, theirs, ran)
    return [ours, theirs]
