"""Engine: what the server talks to. Loads, admits, tokenizes, submits, cancels; the loop does the rest."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count

from engine.errors import EngineDead, EngineError, InvalidRequest, Overloaded, RequestFailed, frames_of
from engine.loop.controls import Controls
from engine.loop.engine_loop import EngineLoop
from engine.loop.engine_parts import Companion, EngineInfo, EngineLimits, EngineParts, EngineState, Executors
from engine.loop.open_requests import Ending, OpenRequests, RequestCounts
from engine.loop.stream import RequestStream
from engine.loop.text_calls import TextCalls
from engine.loop.text_thread import TextThread
from engine.loop.time_limits import TimeLimits, deadline_passed, deadline_too_soon
from engine.loop.watchdog import Watchdog, thread_stacks
from engine.plan.admission import Admission, check_choice_of_tokens, check_prompt
from engine.plan.metrics.batch_metrics import BatchMetrics, EngineGauges
from engine.plan.request import FinishReason, GenerationRequest, Request, RequestStatus
from engine.plan.speculation.drafting_state import DraftingState
from engine.text.reply.reply_format import ReplyFormat
from engine.text.tokenizer import Tokenizer

log = logging.getLogger("slipstream.engine")

_LAST_MOMENT_S = 0.2  # for a step that hangs to come back all the same, before it is left behind


class Engine:
    """One model, one loop, many streams. Every method is for the event-loop thread.

    `load` builds the parts; it runs on the target thread so that the server can answer meanwhile. It gives
    None where nothing generates: then only the `companion` is served.
    """

    def __init__(
        self,
        load: Callable[[], EngineParts | None],
        limits: EngineLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        executors: Executors | None = None,
    ) -> None:
        self._load = load
        self._limits = limits or EngineLimits()
        self._clock = clock
        self._executors = executors or Executors.threads()
        num_places, has_tenants = self._limits.max_queued_requests, self._limits.has_tenants
        self._admission = Admission(
            *(num_places, self._limits.max_queued_tokens, self._retry_after_s, has_tenants),
            weights=self._limits.tenant_weights,
            reply_of=self._waiting_reply_of,
            displace=self._displace,
        )
        self._text_admission = Admission(max(1, num_places // 4), 0, lambda _: 1, has_tenants)
        self.state = EngineState.LOADING
        self.fault: EngineDead | None = None  # what it died of, a hang included
        self.metrics = BatchMetrics()
        self._text_thread = TextThread(self._executors.text, self.metrics, self._executors.num_text_threads)
        self.text = TextCalls(self._text_thread, lambda: self._loaded)
        self._time_limits = TimeLimits(self._limits.queue_timeout_s, clock, self._on_due)
        self._counts = RequestCounts(self.metrics)
        self._requests = OpenRequests(self.metrics, self._counts, clock, self._time_limits)
        self.controls = Controls(
            self._requests, self._time_limits, clock, lambda: self._loaded, self.drafting
        )
        self._watchdog = Watchdog(self._limits.watchdog_timeout_s, clock, self._on_hung)
        self._arrivals = count(1)
        self._parts: EngineParts | None = None
        self._loop: EngineLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._died = asyncio.Event()
        self.companion: Companion | None = None

    # Life.

    async def start(self) -> None:
        """Load the model, then serve until `stop`; one that came meanwhile counts. Raises StartRefused."""
        parts = await asyncio.get_running_loop().run_in_executor(self._executors.target, self._load)
        if self.companion is not None:
            await self.companion.start()
        if parts is not None:
            self._parts = parts
            self.metrics.speculation = parts.batcher.decoder.stats
            self._loop = EngineLoop(
                parts, self._requests, self.metrics, self._executors, self._clock, self._watchdog
            )
            if parts.prefix_store is not None:
                parts.prefix_store.start(self.metrics, self._resume)
        if self.state is EngineState.LOADING:
            self.state = EngineState.READY
            if self._loop is not None:
                self._task = asyncio.create_task(self._serve(self._loop), name="slipstream-engine-loop")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, let what is accepted finish for up to `timeout_s`, then end the rest at once."""
        if self.state in (EngineState.LOADING, EngineState.READY):
            self.state = EngineState.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                await self._requests.wait_until_none()
                if self.companion is not None:
                    await self.companion.wait_until_none()
                if self._parts is not None and self._parts.prefix_store is not None:
                    await self._parts.prefix_store.flush()
        except TimeoutError:
            self._end_all()

    async def stop(self) -> None:
        """End every open stream with an error, stop after the step in flight, leave behind what hangs."""
        await self.drain(0)
        if self._loop is not None and self._task is not None:
            self._loop.stop()
            death = asyncio.create_task(self._died.wait())
            await asyncio.wait([self._task, death], return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            await asyncio.wait([self._task], timeout=_LAST_MOMENT_S)
        self._text_thread.close()
        if self._parts is not None and self._parts.prefix_store is not None:
            self._parts.prefix_store.stop()
        if self.companion is not None:
            self.companion.stop()
        self._executors.shutdown(wait=self.state is not EngineState.DEAD)

    async def wait_dead(self) -> None:
        """Return when the engine has died of `fault`; never if it is stopped in order."""
        await self._died.wait()

    def _end_all(self) -> None:
        error = Overloaded("The server is shutting down.", code="draining")
        if len(self._requests):
            log.warning("%d requests are cut short by the end of the server", len(self._requests))
        for request in self._requests.all():
            assert self._loop is not None
            self._loop.end_now(request.request_id, Ending(FinishReason.ABORT, error, abort="drain"))
        if self.companion is not None:
            self.companion.end_all(error)

    async def _serve(self, loop: EngineLoop) -> None:
        try:
            await loop.run()
        except (Exception, asyncio.CancelledError) as cause:
            if isinstance(cause, asyncio.CancelledError) and loop.is_stopping:
                raise  # left behind by `stop`, as the event loop ends
            log.exception("the engine loop has died")
            self._die(loop, EngineDead(f"The engine has stopped after a fault ({type(cause).__name__})."))

    def _on_hung(self, seconds: float) -> None:
        loop = self._loop
        assert loop is not None
        self.metrics.count_error("watchdog")
        log.error(
            "a step hangs: no progress for %.1f s with %d requests open",
            seconds,
            len(self._requests),
            extra={**loop.describe_step(), "stack": thread_stacks("target", "draft")},
        )
        limit = f"{self._limits.watchdog_timeout_s:g} s"
        self._die(loop, EngineDead(f"The engine has made no progress for {limit}, the limit.", "engine_hung"))
        loop.stop()

    def _die(self, loop: EngineLoop, fault: EngineDead) -> None:
        """End everything for good; the first fault is what it died of."""
        self.state = EngineState.DEAD
        self.fault = self.fault or fault
        if self.companion is not None:
            self.companion.end_all(self.fault)
        try:
            loop.fail_all(self.fault)
        finally:
            self._died.set()

    # What callers ask before and beside generating.

    def now(self) -> float:
        """Seconds of the engine's monotonic clock, in which arrivals and deadlines are given."""
        return self._clock()

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Raises Overloaded (loading) before that."""
        return self._loaded.info

    @property
    def tokenizer(self) -> Tokenizer:
        """For single tokens; whole texts are worked on off the loop. Raises Overloaded (loading)."""
        return self._loaded.tokenizer

    @property
    def _loaded(self) -> EngineParts:
        if self._parts is None:
            self._check_open()
            raise InvalidRequest("This server generates no text: it serves an embedding model alone.")
        return self._parts

    @property
    def generates(self) -> bool:
        """False once it is known that only the companion is served."""
        return self._parts is not None or self.state is EngineState.LOADING

    def gauges(self) -> EngineGauges:
        """The state of this instant; while loading, that of an engine with nothing to do and no room."""
        if self._parts is None:
            return EngineGauges(0, 0, 0, 0, 0, 0, 0.0)
        batcher = self._parts.batcher
        decoder = batcher.decoder
        kv_blocks_cached = batcher.kv.pool.num_free_kept
        return EngineGauges(
            num_requests_running=len(batcher.running),
            num_requests_waiting=len(batcher.queue),
            num_requests_swapped=batcher.kv.host.num_saved,
            kv_blocks_used=batcher.kv.num_used_blocks,
            kv_blocks_cached=kv_blocks_cached,
            kv_blocks_free=batcher.kv.pool.num_free - kv_blocks_cached,
            heartbeat_age_s=self._watchdog.age_s,
            speculation_draft_length=decoder.gain.draft_length,
            speculation_acceptance=decoder.stats.recent.ratio,
            speculation_speedup=decoder.gain.speedup,
            formula=decoder.gain.terms,
        )

    def drafting(self) -> DraftingState | None:
        """Who drafts at this instant, when, and why not; None where nothing generates, or not yet."""
        return None if self._loop is None else self._loop.drafting()

    @property
    def is_idle(self) -> bool:
        """True while nothing runs or waits."""
        return self._parts is not None and not self._parts.batcher.has_work

    def expect_prompt(self, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """A prompt will begin with these tokens: what is not cached of them is computed in idle steps."""
        batcher = self._loaded.batcher
        if batcher.config.prefix_caching and self._loop is not None:
            batcher.next_turns.expect(token_ids, cache_salt)
            self._loop.wake()

    def next_turn_tokens(self) -> dict[str, int]:
        """Tokens so computed: `used`, that a prompt began with, and `unused`, dropped before one did."""
        if self._parts is None:
            return {"used": 0, "unused": 0}
        turns = self._parts.batcher.next_turns
        return {"used": turns.num_used, "unused": turns.num_unused}

    def decode_steps_s(self, most: int) -> Sequence[float] | None:
        """Measured seconds, never sinking, of steps of 1, 2, ... `most` sequences, a token each, or None."""
        seconds = self._loaded.batcher.decoder.costs.plain(most)
        return None if seconds is None else seconds.tolist()

    @property
    def reply_format(self) -> ReplyFormat:
        """How replies to chats are read, and how their grammars are gated. Raises Overloaded (loading)."""
        return self._loaded.reply_format

    # Requests.

    def admit(self, num_requests: int, tenant: str | None = None, priority: int = 0) -> ExitStack:
        """Take queue places before tokenizing; use as a context manager around it and `submit_all`.

        In a full queue they may be others', who end with an Overloaded then: see `Admission`. Raises
        Overloaded (queue_full, loading, draining) or EngineDead, and counts the refusal.
        """
        with self._counts.refusals():
            self._check_open()
            return self._admission.admit(num_requests, self._loaded.batcher.queue, tenant, priority)

    def admit_text(self, tenant: str | None = None) -> ExitStack:
        """A place for a request that wants text or token ids only; raises what `admit` does.

        There are a quarter as many as places in the queue, which these take nothing of.
        """
        with self._counts.refusals():
            self._check_open()
            return self._text_admission.admit(1, (), tenant)

    def miss_deadline(self) -> None:
        """Count a request whose deadline passed before it could be submitted."""
        self._counts.miss_deadline()

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue one request; see `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[RequestStream]:
        """Queue the choices of one reply; each stream ends exactly once. Call inside the permit of `admit`.

        All are checked before any is opened: what raises InvalidRequest (ContextLengthExceeded), Overloaded,
        DeadlineExceeded or EngineDead has started nothing.
        """
        parts = self._loaded
        for request in requests:
            check_prompt(request, parts.info.max_model_len, parts.info.vocab_size)
            check_choice_of_tokens(request.sampling, parts.eos_token_ids)
        now, batcher = self._clock(), parts.batcher
        records = [
            Request.of(request, parts.eos_token_ids, next(self._arrivals), now) for request in requests
        ]
        idle = {request.request_id for request in requests if request.computes_nothing}
        queued = [record for record in records if record.request_id not in idle]
        with self._counts.refusals():
            self._check_open()
            self._admission.check_tokens(queued, batcher.queue, min((r.priority for r in queued), default=0))
        for place, record in enumerate(queued, start=1):
            if place == len(queued) or queued[place].fork_of is None:  # the last choice of a prompt ends last
                self._check_deadline(record, queued[: place - 1])
        streams = [self._make_stream(request) for request in requests]
        for request, record, stream in zip(requests, records, streams, strict=True):
            if record.request_id not in idle:
                batcher.add(record)
            self._requests.open(record, stream, request.group)
        for record in records:
            self._time_limits.watch(record)  # all are open: what has passed by now ends a part of the reply
            if record.request_id in idle:
                self._end(record.request_id, Ending(FinishReason.LENGTH))
        if self._loop is not None:
            self._loop.wake()
        return streams

    def cancel(self, request_id: str, abort: str = "cancel") -> bool:
        """End an open request with ABORT within a step; False when there is no such request any more."""
        if request_id not in self._requests:
            return False
        self._end(request_id, Ending(FinishReason.ABORT, abort=abort))
        return True

    def _retry_after_s(self, num_requests: int) -> int:
        return 1 if self._loop is None else self._loop.retry_after_s(num_requests)

    def _waiting_reply_of(self, request: Request) -> Sequence[Request]:
        """All of the request's reply, or nothing if any of it has started."""
        reply = self._requests.reply_of(request.request_id)
        return reply if all(each.status is RequestStatus.WAITING for each in reply) else ()

    def _displace(self, request: Request, error: Overloaded) -> None:
        assert self._loop is not None
        self._loop.end_now(request.request_id, Ending(FinishReason.ABORT, error, abort="displaced"))

    def _check_deadline(self, record: Request, before: Sequence[Request]) -> None:
        """Refuse, and count, what will not end in time; see `can_meet`."""
        batcher, now = self._loaded.batcher, self._clock()
        if record.deadline is None or (record.deadline > now and batcher.can_meet(record, before)):
            return
        refusal = deadline_passed(record) if record.deadline <= now else deadline_too_soon(record, now)
        self._counts.miss_deadline()
        needed_s = batcher.completion_s(record, before)
        if needed_s is not None:
            refusal.completion_s = now + needed_s - record.arrival_time
            refusal.retry_after_s = max(1, math.ceil(now + needed_s - record.deadline))
        raise refusal

    def _check_open(self) -> None:
        if self.fault is not None:
            raise EngineDead(str(self.fault), self.fault.code)
        if self.state is EngineState.DRAINING:
            retry_after_s = self._retry_after_s(len(self._requests))
            raise Overloaded("The server is shutting down.", code="draining", retry_after_s=retry_after_s)
        if self.state is EngineState.LOADING:
            raise Overloaded("The model is still loading.", code="loading")

    def _make_stream(self, request: GenerationRequest) -> RequestStream:
        sampling = request.sampling
        detokenizer = self._loaded.detokenizer(
            self.tokenizer,
            request.prompt_token_ids,
            shown_special_ids=sampling.shown_special_ids if sampling.skip_special_tokens else None,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        return RequestStream(
            request.request_id,
            detokenizer,
            self._abandon,
            checks_stops=bool(sampling.stop),
            scores_only=request.scores_only,
            wake=self._requests.turns.add,
        )

    def _abandon(self, request_id: str, failure: RequestFailed | None) -> None:
        """A stream's reader has gone, or its text could not be decoded."""
        if failure is None:
            self.cancel(request_id, abort="disconnect")
        else:
            log.error("%s", failure, extra=frames_of(failure.__cause__ or failure))
            self.metrics.count_error(failure.stage)
            self._end(request_id, Ending(FinishReason.ERROR, failure))

    def _on_due(self, request: Request, error: EngineError) -> None:
        """A request's time is up, be it the deadline's or the queue's."""
        assert self._loop is not None
        if isinstance(error, Overloaded):
            if self._requests.has_begun(request.request_id):
                return  # its reply is being computed, and a choice waits for a seat
            error.retry_after_s = self._retry_after_s(len(self._loaded.batcher.queue))
            self._loop.end_now(request.request_id, Ending(FinishReason.ABORT, error, abort="timeout"))
        else:
            self._loop.end_now(request.request_id, Ending(FinishReason.DEADLINE, error))

    def _resume(self, request_id: str) -> None:
        """What a request was held for is in the prefix cache, or will not be."""
        self._loaded.batcher.resume(request_id)
        assert self._loop is not None
        self._loop.wake()

    def _end(self, request_id: str, ending: Ending) -> None:
        if self._loop is not None:
            self._loop.end(request_id, ending)
