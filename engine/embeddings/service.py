"""EmbeddingService: texts to vectors and pairs to scores, on the thread that runs the generator's steps.

A batch is one pass, which gives way to steps; see SharedThread. Requests pass the same gates as those that
generate: places in a queue, tokens that wait, deadlines, time in the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from engine.compute.embedding.records import EmbedderInfo, EncodedText
from engine.embeddings.metrics import EmbeddingMetrics
from engine.embeddings.shared_thread import PassDropped, SharedThread
from engine.embeddings.text_queue import Chosen, TextJob, TextQueue
from engine.embeddings.text_reader import EmbeddingParts, TextReader, TextReading
from engine.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    Overloaded,
    RequestFailed,
    frames_of,
    release_frames,
)
from engine.loop.daemon_executor import DaemonExecutor
from engine.loop.engine import Engine
from engine.loop.engine_parts import EngineLimits, EngineState
from engine.loop.open_requests import Ending, RequestCounts
from engine.loop.text_thread import TextThread
from engine.plan.admission import Admission
from engine.plan.request import FinishReason
from engine.plan.scheduling.service_rates import DrainRate

if TYPE_CHECKING:  # they bring torch along, which the server does without until it loads the model
    pass

log = logging.getLogger("slipstream.engine")

BATCH_TOKENS = 1024  # enough to keep the cores busy; more would only make a request wait for others
_TEXT_THREADS = 2


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What to compute for one reply. `deadline` is in seconds of the engine's clock, None for no limit."""

    texts: Sequence[EncodedText]
    tenant: str | None
    arrival_time: float
    deadline: float | None = None
    was_stalled: Callable[[], bool] = lambda: False  # whether a client that left had stopped reading


class EmbeddingService:
    """Serves one embedding model or cross-encoder beside `engine`, or none. For the event-loop thread.

    `load` gives None where there is no such model; it runs on the shared thread.
    """

    def __init__(
        self,
        engine: Engine,
        load: Callable[[], EmbeddingParts | None],
        thread: SharedThread,
        limits: EngineLimits,
    ) -> None:
        self._engine = engine
        self._load = load
        self._thread = thread
        self._limits = limits
        self.metrics = EmbeddingMetrics()
        self._counts = RequestCounts(engine.metrics)
        self._drain_rate = DrainRate()
        self._admission = Admission(
            limits.max_queued_requests, limits.max_queued_tokens, self._retry_after_s, limits.has_tenants
        )
        self._text_executor = DaemonExecutor("embedding-text", _TEXT_THREADS)
        self._text = TextThread(self._text_executor, engine.metrics, _TEXT_THREADS)
        self._parts: EmbeddingParts | None = None
        self._queue = TextQueue()
        self._done: dict[TextJob, asyncio.Future[None]] = {}  # of each open request
        self._batch: list[Chosen] = []  # that is being computed
        self._task: asyncio.Task[None] | None = None
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._ids = count(1)

    # Life: see Companion.

    async def start(self) -> None:
        """Load the model, if there is one. Raises StartRefused."""
        self._parts = await asyncio.wrap_future(self._thread.submit_pass(self._load))

    async def wait_until_none(self) -> None:
        """Return when no request is open."""
        await self._none_open.wait()

    def end_all(self, error: EngineError) -> None:
        """End every open request with `error`."""
        for done in list(self._done.values()):
            if not done.done():
                done.set_exception(error)

    def stop(self) -> None:
        """Take no more text. What is open has been ended."""
        self._text.close()
        self._text_executor.shutdown(wait=False, cancel_futures=True)

    # What callers ask.

    @property
    def is_loaded(self) -> bool:
        """True if there is a model, and it is there."""
        return self._parts is not None

    @property
    def info(self) -> EmbedderInfo:
        """What was loaded. Raises Overloaded (loading) before that."""
        return self._loaded.embedder.info

    @property
    def num_open(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._done)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of texts that no batch has yet."""
        return self._queue.num_tokens

    @property
    def num_waiting(self) -> int:
        """Requests with texts that no batch has yet."""
        return len(self._queue)

    @property
    def _loaded(self) -> EmbeddingParts:
        if self._parts is None:
            raise Overloaded("The model is still loading.", code="loading")
        return self._parts

    @property
    def _reader(self) -> TextReader:
        return TextReader(self._loaded, self._text)

    def admit(self, tenant: str | None) -> ExitStack:
        """Take a place in the queue, before tokenizing and until the reply: use as a context manager.

        Raises Overloaded (queue_full, loading, draining) or EngineDead, and counts the refusal.
        """
        with self._counts.refusals():
            self._check_open()
            return self._admission.admit(1, (), tenant)

    async def encode(self, items: Sequence[tuple[str, ...]], reading: TextReading) -> list[EncodedText]:
        """The tokens of texts, or of pairs for a cross-encoder; see TextReader."""
        return await self._reader.encode(items, reading)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for token ids that no text could have; see TextReader."""
        self._reader.check_tokens(token_ids, param)

    async def compute(self, request: EmbeddingRequest) -> np.ndarray:
        """[num_texts, dimensions] in float32, or [num_texts, 1] scores. Call inside the permit of `admit`.

        Raises Overloaded, DeadlineExceeded, RequestFailed or EngineDead. Cancelled, nothing more of it is
        computed.
        """
        job = TextJob(request.tenant, list(request.texts))
        with self._counts.refusals():
            self._check_open()
            self._admission.check_tokens([job], self._queue)
        with self._counted(request):
            done = self._done[job] = asyncio.get_running_loop().create_future()
            self._none_open.clear()
            try:
                self._queue.add(job)
                self._begin()
                with self._queue_timeout(job):
                    await self._until(done, request)
            finally:
                self._forget(job)
            rows: np.ndarray = np.stack(job.rows)
            if not np.isfinite(rows).all():
                raise RequestFailed("the model gave numbers that are not finite", "embedding")
            return rows

    async def _until(self, done: asyncio.Future[None], request: EmbeddingRequest) -> None:
        now = self._engine.now()
        left_s = None if request.deadline is None else max(0.0, request.deadline - now)
        try:
            async with asyncio.timeout(left_s) as timeout:
                await done
        except TimeoutError:
            if request.deadline is None or not timeout.expired():
                raise
            limit = f"{request.deadline - request.arrival_time:.3f}".rstrip("0").rstrip(".")
            raise DeadlineExceeded(
                f"The deadline, {limit} s after the request arrived, passed before all texts were computed."
            ) from None

    @contextmanager
    def _queue_timeout(self, job: TextJob) -> Iterator[None]:
        """End a job that no batch has a text of within --queue-timeout."""
        limit_s = self._limits.queue_timeout_s
        if not limit_s:
            yield
            return

        def give_up() -> None:
            done = self._done.get(job)
            if done is not None and not done.done() and not job.num_begun:
                message = f"The request waited {limit_s:g} s in the queue, the limit."
                retry_after_s = self._retry_after_s(len(self._queue))
                done.set_exception(Overloaded(message, "queue_timeout", retry_after_s))

        timer = asyncio.get_running_loop().call_later(limit_s, give_up)
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _counted(self, request: EmbeddingRequest) -> Iterator[None]:
        """Count a request that was accepted, and how it ends."""
        request_id = f"embedding-{next(self._ids)}"
        self._counts.open(request_id, None)
        ending = Ending(FinishReason.ERROR)
        try:
            yield
            ending = Ending(FinishReason.STOP)
        except asyncio.CancelledError:
            abort = "timeout" if request.was_stalled() else "disconnect"
            ending = Ending(FinishReason.ABORT, abort=abort)
            raise
        except DeadlineExceeded:
            ending = Ending(FinishReason.DEADLINE)
            raise
        except Overloaded as error:
            abort = "timeout" if error.code == "queue_timeout" else "drain"
            ending = Ending(FinishReason.ABORT, error, abort)
            raise
        finally:
            self._counts.close(request_id, ending)
            self.metrics.request_latency.observe(self._engine.now() - request.arrival_time)

    def _forget(self, job: TextJob) -> None:
        """The job is over, however it ended."""
        self._queue.drop(job)
        self._done.pop(job).cancel()
        if not self._done:
            self._none_open.set()

    # Batches.

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_batches(), name="slipstream-embeddings")

    async def _run_batches(self) -> None:
        """Compute until nothing waits."""
        while chosen := self._queue.take(BATCH_TOKENS):
            self._batch = chosen
            began = self._engine.now()
            try:
                rows = await asyncio.wrap_future(self._thread.submit_pass(partial(self._run, chosen)))
            except PassDropped:
                continue
            except Exception as error:
                self._fail(chosen, error)
                continue
            self._deliver(chosen, rows, self._engine.now() - began)

    def _run(self, chosen: Sequence[Chosen]) -> np.ndarray:
        """On the shared thread."""
        return self._loaded.embedder.run([each.text for each in chosen], partial(self._give_way, chosen))

    def _give_way(self, chosen: Sequence[Chosen]) -> None:
        """On the shared thread. Reads what the loop thread writes: that a job is over, no more."""
        self._thread.give_way()
        if not any(self._is_awaited(each.job) for each in chosen):
            raise PassDropped

    def _is_awaited(self, job: TextJob) -> bool:
        done = self._done.get(job)
        return done is not None and not done.done()

    def _deliver(self, chosen: Sequence[Chosen], rows: np.ndarray, seconds: float) -> None:
        num_tokens = sum(len(each.text) for each in chosen)
        self.metrics.texts += len(chosen)
        self.metrics.tokens += num_tokens
        self.metrics.batch_tokens.observe(num_tokens)
        self.metrics.batch_duration.observe(seconds)
        num_ended = 0
        for each, row in zip(chosen, rows, strict=True):
            each.job.rows[each.index] = row
            each.job.num_left -= 1
            done = self._done.get(each.job)
            if done is not None and not each.job.num_left and not done.done():
                done.set_result(None)
                num_ended += 1
        self._drain_rate.observe(num_ended, seconds)

    def _fail(self, chosen: Sequence[Chosen], error: Exception) -> None:
        """One batch's failure is that of its requests."""
        log.error("a batch of embeddings failed", extra=frames_of(error))
        release_frames(error)
        self._engine.metrics.count_error("embedding")
        failure = RequestFailed(f"the forward pass failed ({type(error).__name__})", "embedding")
        for job in {each.job for each in chosen}:
            self._queue.drop(job)
            done = self._done.get(job)
            if done is not None and not done.done():
                done.set_exception(failure)

    def _check_open(self) -> None:
        state = self._engine.state
        if self._engine.fault is not None:
            raise EngineDead(str(self._engine.fault), self._engine.fault.code)
        if state is EngineState.DRAINING:
            retry_after_s = self._retry_after_s(len(self._done))
            raise Overloaded("The server is shutting down.", code="draining", retry_after_s=retry_after_s)
        if state is EngineState.LOADING:
            raise Overloaded("The model is still loading.", code="loading")

    def _retry_after_s(self, num_requests: int) -> int:
        return self._drain_rate.retry_after_s(num_requests)
