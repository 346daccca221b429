"""Those who take part in a comparison, each with the machine to itself while its turn lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.bench.context import BenchContext
from tests.bench.load import HTTP_TIMEOUT_S, Figures, HttpSide, Ran, Side, checked_figures
from tests.bench.peer import Peer
from tests.bench.processes import Child, HttpChild, JsonWorker, Server, free_port
from tests.bench.streams import BenchmarkFailed, BurstFigures, StreamRecord
from tests.bench.workloads import Words, Workload, eight_streams, mixed_lengths

OURS, OURS_DRAFTING = "slipstream", "slipstream, drafting"
PEER_READY_TIMEOUT_S = 600.0  # some compile for minutes
NO_RUN = -1  # the seed of what is not counted


class WorkerSide:
    """A worker that answers a line of JSON with one, as `transformers_worker.py` does."""

    def __init__(self, worker: JsonWorker, name: str) -> None:
        self.name = name
        self._worker = worker

    def burst(self, workload: Workload) -> list[StreamRecord]:
        """Raises ChildFailed or NoAnswer."""
        prompts = [prompt.token_ids for prompt in workload.prompts]
        question = {"prompts": prompts, "max_tokens": workload.max_tokens}
        answer = self._worker.ask(question, HTTP_TIMEOUT_S)
        return [StreamRecord.from_json(record) for record in answer["records"]]


class Contender:
    """A side that runs only for its own bursts; one that is not our child cannot be held back."""

    def __init__(self, side: Side, child: Child | None) -> None:
        self.name = side.name
        self._side = side
        self._child = child

    def burst(self, workload: Workload) -> BurstFigures:
        """Its figures. Raises BenchmarkFailed when it fails or does other work than it was asked for."""
        if self._child is not None:
            self._child.resume()
        try:
            return checked_figures(workload, self._side.burst(workload) or [])
        finally:
            if self._child is not None:
                self._child.pause()


@dataclass
class Comparison:
    """What everybody did of `ran`. Who failed is in `failures`, and takes no further part."""

    figures: Figures = field(default_factory=dict)
    ran: Ran = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        context: BenchContext,
        contenders: Sequence[Contender],
        makers: Sequence[Callable[..., Workload]],
    ) -> None:
        """Everything `context.runs` times; who begins changes with every run."""
        for run in range(context.runs):
            first = run % len(contenders)
            for make in makers:
                workload = make(context.words, run)
                self.ran[workload.name] = workload
                for contender in (*contenders[first:], *contenders[:first]):
                    context.say(f"{workload.name} {contender.name}, run {run + 1}/{context.runs}")
                    self._burst(contender, workload)

    def _burst(self, contender: Contender, workload: Workload) -> None:
        if contender.name in self.failures:
            return
        try:
            figures = contender.burst(workload)
        except BenchmarkFailed as failure:
            self.failures[contender.name] = f"{workload.name}: {failure}"
        else:
            self.figures.setdefault(contender.name, {}).setdefault(workload.name, []).append(figures)


def open_ours(context: BenchContext, stack: ExitStack, client: JsonWorker) -> list[Contender]:
    """Our server without drafts and, in a process of its own, with the drafts that are its default."""
    flags = {OURS: ("--speculative-method", "none"), OURS_DRAFTING: ()}
    contenders = []
    for name, more in flags.items():
        context.say(f"starting {name}")
        server = stack.enter_context(Server(*context.flags, *more))
        server.wait_ready()
        contenders.append(warmed_up(Contender(HttpSide(server, client, name), server), context.words))
    return contenders


def open_peer(peer: Peer, context: BenchContext, stack: ExitStack, client: JsonWorker) -> Contender:
    """A peer that answers. Raises BenchmarkFailed."""
    context.say(f"starting {peer.name}")
    if peer.is_running:
        return warmed_up(Contender(HttpSide(peer.address, client, peer.name), None), context.words)
    port = free_port()
    try:
        if peer.serves_http:
            command = peer.command(context.model_directory, port)
            server = stack.enter_context(HttpChild(command, port, "/health"))
            server.wait_ready(PEER_READY_TIMEOUT_S)
            contender = Contender(HttpSide(server, client, peer.name), server)
        else:
            first, *words = peer.command(context.model_directory, port)
            worker = stack.enter_context(JsonWorker(*words, before=(first,)))
            contender = Contender(WorkerSide(worker, peer.name), worker)
    except OSError as error:
        raise BenchmarkFailed(f"{peer.name} cannot be started: {error}") from error
    return warmed_up(contender, context.words)


def open_peers(
    peers: Iterable[Peer], context: BenchContext, stack: ExitStack, client: JsonWorker
) -> tuple[list[Contender], dict[str, str]]:
    """Those that answer, and by name why the others do not."""
    contenders, failures = [], {}
    for peer in peers:
        try:
            contenders.append(open_peer(peer, context, stack, client))
        except BenchmarkFailed as failure:
            failures[peer.name] = str(failure)
    return contenders, failures


def warmed_up(contender: Contender, words: Words) -> Contender:
    """The same, after bursts that are not counted: few rows and many, short prompts and long."""
    for make in (eight_streams, mixed_lengths):
        contender.burst(make(words, NO_RUN))
    return contender
