"""Engine: the asyncio loop that turns submitted requests into streams of tokens, one batcher step an iteration.

Scheduler, KV and request state is written on the event-loop thread only. The target model runs in an executor of
one thread, which gets a frozen decision and returns a frozen result; the draft executor is idle until a drafter
exists. Nothing polls: the loop waits for work, for the device, or for nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from engine.admission import Admission, Permit
from engine.batch_metrics import BatchMetrics, EngineGauges
from engine.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    OutOfDeviceMemory,
    Overloaded,
    RequestFailed,
)
from engine.outputs import BatchDecision, SampledRows, StepInputs, StepResult
from engine.request import FinishReason, GenerationRequest, Request
from engine.scheduling.batcher import CommittedToken, ContinuousBatcher
from engine.stream import Finish, RequestStream, RequestTiming
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

log = logging.getLogger("slipstream.engine")
T = TypeVar("T")

MAX_FAILED_PASSES = 3  # in a row: the engine is dead
MAX_EMPTY_STEPS = 2  # in a row, with work to do: the scheduler has broken its promise to make progress
IDLE_TASK_NAME = "slipstream-engine-loop"


class EngineState(Enum):
    """Loading, ready, draining, dead: each only ever moves rightwards."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was loaded; constant once the engine is ready. `kv_bytes` is the memory of the K/V tensors."""

    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_kv_blocks: int
    kv_block_size: int
    kv_bytes: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine accepts and how long a step may take before it no longer counts as alive."""

    max_queued_requests: int = 256
    max_queued_tokens: int = 1_000_000
    watchdog_timeout_s: float = 60.0


class StepRunner(Protocol):
    """The model's side of a step; called on the target thread only, never concurrently."""

    def run(self, inputs: StepInputs) -> StepResult:
        """Run one forward pass and sample."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What loading gives the loop. `eos_token_ids` ends any request that does not ignore EOS."""

    runner: StepRunner
    batcher: ContinuousBatcher
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Executors:
    """Where work that must not hold up the event loop runs; each of `target` and `draft` is a single thread."""

    target: Executor
    draft: Executor
    text: Executor

    @classmethod
    def threads(cls) -> Executors:
        """One named thread each, started when first used."""
        return cls(*(ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("target", "draft", "text")))

    def shutdown(self, *, wait: bool) -> None:
        """Take no more work and drop what has not begun; `wait` joins the threads."""
        for executor in (self.text, self.draft, self.target):
            executor.shutdown(wait=wait, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why a request is to be ended from outside the step; `abort` is its label in request_aborts."""

    reason: FinishReason
    error: EngineError | None
    abort: str | None


class Engine:
    """One model, one loop, many streams. Every method is for the event-loop thread.

    `load` builds the parts; it runs on the target thread so that the server can answer meanwhile.
    """

    def __init__(
        self,
        load: Callable[[], EngineParts],
        limits: EngineLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        executors: Executors | None = None,
    ) -> None:
        self._load = load
        self._limits = limits or EngineLimits()
        self._clock = clock
        self._admission = Admission(self._limits.max_queued_requests, self._limits.max_queued_tokens)
        self._executors = executors or Executors.threads()
        self._streams: dict[str, RequestStream] = {}
        self._requests: dict[str, Request] = {}
        self._endings: dict[str, _Ending] = {}
        self._wake = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._died = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._num_arrivals = 0
        self._failed_passes = 0
        self._empty_steps = 0
        self._busy_since: float | None = None  # start of the step in flight; None when idle
        self._parts: EngineParts | None = None
        self.state = EngineState.LOADING
        self.metrics = BatchMetrics()

    # Life.

    async def start(self) -> None:
        """Load the model, then serve until `stop`. Raises StartRefused when it cannot be loaded."""
        self._parts = await self._in_thread(self._executors.target, self._load)
        if self._stopping:
            return
        if self.state is EngineState.LOADING:
            self.state = EngineState.READY
        self._task = asyncio.create_task(self._run(), name=IDLE_TASK_NAME)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, let what is accepted finish for up to `timeout_s`, then end what is left."""
        if self.state in (EngineState.LOADING, EngineState.READY):
            self.state = EngineState.DRAINING
        try:
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        except TimeoutError:
            self._end_all(Overloaded("The server is shutting down.", code="draining"), abort="drain")
            await self._all_ended.wait()

    async def stop(self) -> None:
        """End every stream with an error, stop the loop after the step in flight, join the executors."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.DRAINING
        self._stopping = True
        self._end_all(Overloaded("The server is shutting down.", code="draining"), abort="drain")
        if self._task is not None:
            await asyncio.wait([self._task])
        self._drain_endings()
        self._executors.shutdown(wait=self.state is not EngineState.DEAD)

    async def wait_dead(self) -> None:
        """Return when the loop has died by a fault; never returns for an engine that is stopped in order."""
        await self._died.wait()

    def is_alive(self) -> bool:
        """True unless the engine is dead or a step has run longer than the watchdog allows. From memory."""
        return self.state is not EngineState.DEAD and self._heartbeat_age() <= self._limits.watchdog_timeout_s

    def _heartbeat_age(self) -> float:
        return 0.0 if self._busy_since is None else self._clock() - self._busy_since

    # What callers ask before and beside generating.

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Only once ready."""
        return self._loaded.info

    @property
    def _loaded(self) -> EngineParts:
        if self._parts is None:
            raise Overloaded("The model is still loading.", code="loading")
        return self._parts

    def gauges(self) -> EngineGauges:
        """The state of this instant, all zero while loading."""
        if self._parts is None:
            return EngineGauges(0, 0, 0, 0, 0, 0, 0.0)
        batcher = self._parts.batcher
        return EngineGauges(
            num_requests_running=batcher.num_running,
            num_requests_waiting=batcher.num_waiting,
            num_requests_swapped=0,
            kv_blocks_used=batcher.kv.num_used_blocks,
            kv_blocks_cached=0,
            kv_blocks_free=batcher.kv.num_free_blocks,
            heartbeat_age_s=self._heartbeat_age(),
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize off the loop. Text too long for any prompt is refused before it costs anything."""
        tokenizer, limit = self._loaded.tokenizer, self.info.max_model_len
        if len(text) > tokenizer.char_limit(limit):
            fewest = len(text) * limit // tokenizer.char_limit(limit)
            raise ContextLengthExceeded(limit=limit, prompt_tokens=fewest, max_tokens=0, param="prompt")
        return await self._in_thread(
            self._executors.text, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def render_chat(self, messages: list[dict[str, object]]) -> list[int]:
        """Apply the chat template and tokenize, off the loop. Raises InvalidRequest."""
        tokenizer, limit = self._loaded.tokenizer, self.info.max_model_len
        length = sum(len(str(message.get("content") or "")) for message in messages)
        if length > tokenizer.char_limit(limit):
            fewest = length * limit // tokenizer.char_limit(limit)
            raise ContextLengthExceeded(limit=limit, prompt_tokens=fewest, max_tokens=0, param="messages")
        return await self._in_thread(self._executors.text, lambda: tokenizer.render_chat(messages))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole token list, off the loop."""
        tokenizer = self._loaded.tokenizer
        return await self._in_thread(
            self._executors.text, lambda: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def token_text(self, token_id: int) -> str:
        """The text of a single token, as logprobs show it."""
        return self._loaded.tokenizer.token_text(token_id)

    # Requests.

    def admit(self, num_requests: int) -> Permit:
        """Take queue places before tokenizing; use as a context manager around it and `submit`.

        Raises Overloaded (queue_full, loading, draining) or EngineDead, and counts the refusal.
        """
        try:
            self._check_open()
            return self._admission.admit(num_requests, self._loaded.batcher.num_waiting)
        except Overloaded as refusal:
            self.metrics.requests_rejected[refusal.code] += 1
            raise

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue one request; its stream ends exactly once. Call inside the permit of `admit`.

        Raises InvalidRequest (ContextLengthExceeded), Overloaded or EngineDead; nothing is kept then.
        """
        self._check_open()
        self._check_request(request)
        batcher = self._loaded.batcher
        try:
            self._admission.check_tokens(len(request.prompt_token_ids), batcher.num_waiting_tokens)
        except Overloaded as refusal:
            self.metrics.requests_rejected[refusal.code] += 1
            raise
        sampling = request.sampling
        detokenizer = Detokenizer(
            self._loaded.tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        stream = RequestStream(
            request.request_id, detokenizer, self._on_abandon, checks_stops=bool(sampling.stop)
        )
        record = self._make_record(request)
        batcher.add(record)
        self._streams[record.request_id] = stream
        self._requests[record.request_id] = record
        self._all_ended.clear()
        self.metrics.requests_started += 1
        self._wake.set()
        return stream

    def cancel(self, request_id: str, abort: str = "cancel") -> bool:
        """End a live request with ABORT within a step; False when there is no such request any more."""
        if request_id not in self._requests:
            return False
        self._end(request_id, _Ending(FinishReason.ABORT, None, abort))
        return True

    def _check_open(self) -> None:
        if self.state is EngineState.DEAD:
            raise EngineDead("The engine has stopped after a fault.")
        if self.state is EngineState.DRAINING:
            raise Overloaded("The server is shutting down.", code="draining")
        if self.state is EngineState.LOADING:
            raise Overloaded("The model is still loading.", code="loading")

    def _check_request(self, request: GenerationRequest) -> None:
        info, prompt = self.info, request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
        if len(prompt) + request.sampling.max_tokens > info.max_model_len:
            raise ContextLengthExceeded(
                limit=info.max_model_len,
                prompt_tokens=len(prompt),
                max_tokens=request.sampling.max_tokens,
                param="prompt" if len(prompt) >= info.max_model_len else "max_tokens",
            )
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            raise InvalidRequest(
                f"The prompt holds a token id outside the vocabulary: ids go from 0 to {info.vocab_size - 1}.",
                param="prompt",
            )

    def _make_record(self, request: GenerationRequest) -> Request:
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self._loaded.eos_token_ids
        self._num_arrivals += 1
        return Request(
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=sampling,
            stop_token_ids=sampling.stop_token_ids | eos,
            arrival=self._num_arrivals,
            arrival_time=self._clock(),
            priority=request.priority,
            tenant=request.tenant,
        )

    # The loop.

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._drain_endings()
                if self._loaded.batcher.has_work:
                    await self._step()
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:
            log.exception("the engine loop has died")
            self._die(error)

    async def _step(self) -> None:
        """Schedule, run, commit: one iteration."""
        batcher = self._loaded.batcher
        started = self._busy_since = self._clock()
        try:
            decision = batcher.step()
            if decision.preempted:
                self.metrics.preemptions["recompute"] += len(decision.preempted)
            if decision.inputs is None:
                self._empty_steps += 1
                if self._empty_steps > MAX_EMPTY_STEPS:
                    raise EngineDead("The scheduler has work but schedules nothing.")
                return
            self._empty_steps = 0
            result = await self._forward(decision, decision.inputs)
            now = self._clock()
            self._drain_endings()
            if result is not None:
                self._deliver(batcher.commit(decision, result.rows), result.rows, now)
                self._record_step(decision, now - started)
        finally:
            self._busy_since = None

    async def _forward(self, decision: BatchDecision, inputs: StepInputs) -> StepResult | None:
        """The result of the pass; None when it failed and its requests were dealt with."""
        batcher, runner = self._loaded.batcher, self._loaded.runner
        try:
            result = await self._in_thread(self._executors.target, runner.run, inputs)
        except Exception as error:
            log.exception("a forward pass failed")
            self._failed_passes += 1
            self.metrics.engine_errors["forward"] += 1
            if self._failed_passes >= MAX_FAILED_PASSES:
                raise
            first = self._failed_passes == 1
            if first and isinstance(error, OutOfDeviceMemory) and batcher.preempt_for_memory(decision):
                return None
            failure = RequestFailed(f"the forward pass failed: {type(error).__name__}", "forward")
            for request in batcher.abandon(decision, fail=True):
                self._finish(request, FinishReason.ERROR, error=failure)
            return None
        self._failed_passes = 0
        return result

    def _deliver(self, committed: list[CommittedToken], rows: SampledRows, now: float) -> None:
        """Hand each committed token to its stream and end what has ended."""
        streams, logprobs = self._streams, rows.logprobs
        gaps: Counter[float] = Counter()
        for token in committed:
            request, reason = token.request, token.finish_reason
            stream = streams[request.request_id]
            if token.error is not None:
                self.metrics.engine_errors["sampler"] += 1
                self._finish(request, FinishReason.ERROR, error=RequestFailed(token.error, "sampler"))
                continue
            if stream.first_token_time is None:
                stream.first_token_time = now
                self.metrics.time_to_first_token.observe(now - request.arrival_time)
            else:
                gaps[stream.last_token_time] += 1
            stream.last_token_time = now
            by_id = reason is FinishReason.STOP
            try:
                stop = stream.put(
                    token.token_id,
                    logprobs[token.row] if logprobs is not None else None,
                    shown=not by_id,
                )
            except Exception:
                log.exception("a request's text could not be decoded")
                self._end_with_failure(request, "detokenizer", "the output could not be decoded")
                continue
            if stop is not None:
                self._loaded.batcher.finish(request.request_id, FinishReason.STOP)
                self._finish(request, FinishReason.STOP, stop_reason=stop)
            elif reason is not None:
                named = by_id and token.token_id in request.sampling.stop_token_ids
                self._finish(request, reason, stop_reason=token.token_id if named else None)
        for last, times in gaps.items():
            self.metrics.inter_token_latency.observe(now - last, times)
        self.metrics.generation_tokens += len(committed)

    def _record_step(self, decision: BatchDecision, seconds: float) -> None:
        if decision.num_prefill_tokens == 0:
            phase = "decode"
        else:
            phase = "mixed" if decision.num_decode_tokens else "prefill"
        self.metrics.step_duration[phase].observe(seconds)
        self.metrics.step_batched_tokens.observe(decision.num_tokens)

    # Endings.

    def _on_abandon(self, request_id: str, failure: RequestFailed | None) -> None:
        if failure is None:
            self.cancel(request_id, abort="disconnect")
        else:
            self.metrics.engine_errors[failure.stage] += 1
            self._end(request_id, _Ending(FinishReason.ERROR, failure, None))

    def _end_with_failure(self, request: Request, stage: str, message: str) -> None:
        self.metrics.engine_errors[stage] += 1
        self._loaded.batcher.finish(request.request_id, FinishReason.ERROR)
        self._finish(request, FinishReason.ERROR, error=RequestFailed(message, stage))

    def _end(self, request_id: str, ending: _Ending) -> None:
        """Note that a request is to end; done before the next step, or before the flying one is committed."""
        self._endings.setdefault(request_id, ending)
        self._wake.set()

    def _end_all(self, error: EngineError, abort: str | None) -> None:
        for request_id in self._requests:
            self._end(request_id, _Ending(FinishReason.ABORT, error, abort))

    def _drain_endings(self) -> None:
        endings, self._endings = self._endings, {}
        for request_id, ending in endings.items():
            request = self._requests.get(request_id)
            if request is None:
                continue  # it ended by itself first
            self._loaded.batcher.finish(request_id, ending.reason)
            if ending.abort is not None:
                self.metrics.request_aborts[ending.abort] += 1
            self._finish(request, ending.reason, error=ending.error)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: EngineError | None = None,
    ) -> None:
        """The one place where a request's stream gets its terminal event and its figures are counted."""
        request_id, now = request.request_id, self._clock()
        stream = self._streams.pop(request_id)
        del self._requests[request_id]
        scheduled = request.first_scheduled_time
        first, num_output = stream.first_token_time, request.num_output_tokens
        timing = RequestTiming(
            queue_s=(now if scheduled is None else scheduled) - request.arrival_time,
            time_to_first_token_s=None if first is None else first - request.arrival_time,
            generation_s=0.0 if first is None else stream.last_token_time - first,
            mean_itl_s=None
            if first is None or num_output < 2
            else (stream.last_token_time - first) / (num_output - 1),
            num_preemptions=request.num_preemptions,
        )
        self._count_finished(request, reason, timing, now)
        stream.finish(
            Finish(
                reason=reason,
                stop_reason=stop_reason,
                error=error,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=num_output,
                num_cached_tokens=0,
                timing=timing,
            )
        )
        if not self._requests:
            self._all_ended.set()

    def _count_finished(
        self, request: Request, reason: FinishReason, timing: RequestTiming, now: float
    ) -> None:
        metrics = self.metrics
        metrics.requests_finished[reason] += 1
        metrics.prompt_tokens += request.num_prompt_tokens
        metrics.e2e_request_latency.observe(now - request.arrival_time)
        metrics.request_queue_time.observe(timing.queue_s)
        if timing.time_to_first_token_s is not None:
            metrics.request_prefill_time.observe(timing.time_to_first_token_s - timing.queue_s)
            metrics.request_decode_time.observe(timing.generation_s)
        metrics.request_prompt_tokens.observe(request.num_prompt_tokens)
        metrics.request_generation_tokens.observe(request.num_output_tokens)
        metrics.request_preemptions.observe(request.num_preemptions)

    def _die(self, cause: BaseException) -> None:
        """The loop is over by a fault: every open request ends with an error, nothing is accepted any more."""
        self.state = EngineState.DEAD
        error = EngineDead(f"The engine has stopped after a fault ({type(cause).__name__}).")
        error.__cause__ = cause
        for request in list(self._requests.values()):
            self._finish(request, FinishReason.ERROR, error=error)
        self._endings.clear()
        self._died.set()

    async def _in_thread(self, executor: Executor, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *args)
