"""EngineLoop: schedule, run, commit, deliver; one batcher step an iteration, until told to stop.

The model runs in an executor of one thread, which gets a frozen decision and returns a frozen result. A
device that can is given the next step before the last one's tokens are read, where it can be decided without
them; if only its draw cannot, its pass begins all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from engine.errors import (
    DeviceLost,
    EngineDead,
    EngineError,
    OutOfDeviceMemory,
    RequestFailed,
    frames_of,
    release_frames,
)
from engine.loop.engine_parts import EngineParts, Executors
from engine.loop.open_requests import Ending, OpenRequests
from engine.loop.run_ahead import RunAhead
from engine.loop.step_pipeline import StepPipeline
from engine.loop.time_limits import deadline_too_soon
from engine.loop.watchdog import Watchdog
from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.in_flight import CommittedToken
from engine.plan.scheduling.service_rates import DrainRate
from engine.plan.speculation.drafting_state import DraftingState
from engine.plan.step_records import BatchDecision, SampledRows, StepResult

log = logging.getLogger("slipstream.engine")

MAX_FAILED_BATCHES = 3  # in a row, no part of them went well: the engine is dead
REPORT_EVERY_S = 60.0
IDLE_CHECK_S = 1.0  # idle this long before the KV accounts are checked, so that no next request waits for it
MAX_EMPTY_STEPS = 2  # in a row, with work to do: the scheduler has broken its promise of progress


class EngineLoop:
    """Drives one batcher and one runner, and reports to the watchdog. For the event-loop thread.

    Endings from outside (cancel, disconnect) are noted and carried out between steps, or between a step's
    result and its commit; only a request whose time is up, or the server's, ends in the middle of a step. Its
    blocks, which the device may still write, are the batcher's until the step lands.
    """

    def __init__(
        self,
        parts: EngineParts,
        requests: OpenRequests,
        metrics: BatchMetrics,
        executors: Executors,
        clock: Callable[[], float],
        watchdog: Watchdog,
    ) -> None:
        self._batcher = parts.batcher
        self._pipeline = StepPipeline(parts.runner, executors.target, requests.turns)
        self._requests = requests
        self._metrics = metrics
        self._clock = clock
        self._watchdog = watchdog
        self._decoder = parts.batcher.decoder
        self._run_ahead = RunAhead(self._decoder, executors.draft, metrics, clock)
        self._endings: dict[str, Ending] = {}
        self._wake = asyncio.Event()
        self.is_stopping = False  # True once `stop` was called
        self._is_checked = True  # the KV accounts, since the last step
        self._kv_is_sound = True  # as far as known
        self._failed_passes = 0  # since one went well
        self._failed_batches = 0  # the same
        self._empty_steps = 0
        self._decision: BatchDecision | None = None  # that of the step being carried out
        self._ahead: BatchDecision | None = None  # launched behind it
        self._landed_at = 0.0  # the last step that went well
        self._next_report = clock() + REPORT_EVERY_S
        self._drain_rate = DrainRate()
        self._num_ended = 0  # of the requests, when the drain rate was last told

    def describe_step(self) -> dict[str, object]:
        """What the loop is at, for the log: the step in flight, or that none was decided yet."""
        decision = self._decision
        if decision is None:
            return {"step": "not decided"}
        return {
            "step": decision.step_id,
            "num_seqs": len(decision.scheduled),
            "prefill_tokens": decision.num_prefill_tokens,
            "decode_tokens": decision.num_decode_tokens,
            "draft_tokens": decision.num_draft_tokens,
        }

    def drafting(self) -> DraftingState:
        """Who drafts at this instant, when, and why not."""
        return self._run_ahead.state()

    def retry_after_s(self, num_requests: int) -> int:
        """Whole seconds, at least 1, until that many requests will have ended at the measured rate."""
        return self._drain_rate.retry_after_s(num_requests)

    def wake(self) -> None:
        """Say that there is something to do."""
        self._watchdog.note_work()
        self._wake.set()

    def end(self, request_id: str, ending: Ending) -> None:
        """Note that an open request is to end within a step; the first reason given counts."""
        self._endings.setdefault(request_id, ending)
        self._wake.set()

    def end_now(self, request_id: str, ending: Ending) -> None:
        """End an open request at once, even in the middle of a step that takes long."""
        self._carry_out(request_id, self._endings.pop(request_id, ending))

    def stop(self) -> None:
        """Make `run` return after the step in flight."""
        self.is_stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until `stop`; what has been noted to end by then is ended.

        Raises what killed the loop: MAX_FAILED_BATCHES failed ones in a row, DeviceLost, a fault of its own.
        Open requests are then still open: the caller ends them with `fail_all`.
        """
        try:
            while not self.is_stopping:
                self._carry_out_endings()
                if self._batcher.has_work or self._ahead is not None or self._batcher.read_ahead():
                    await self._step()
                    self._watchdog.note_progress()
                    self._is_checked = False
                else:
                    await self._rest()
            if (ahead := await self._drop_ahead()) is not None:
                self._batcher.abandon(ahead)
            self._carry_out_endings()
        finally:
            self._watchdog.stop()
            self._run_ahead.stop()

    async def _rest(self) -> None:
        """Wait for something to do; check the KV accounts once when none has come for IDLE_CHECK_S."""
        self._watchdog.note_rest()
        self._run_ahead.rest()
        wake = self._wake
        wake.clear()
        if not self._is_checked:
            try:
                async with asyncio.timeout(IDLE_CHECK_S):
                    await wake.wait()
                return
            except TimeoutError:
                self._check_kv()
        await wake.wait()

    def _check_kv(self) -> None:
        """Look for lost or doubled KV blocks. The first fault is logged and counted; serving goes on."""
        self._is_checked = True
        if not self._kv_is_sound:
            return
        try:
            self._batcher.kv.check_integrity()
        except AssertionError as fault:
            self._kv_is_sound = False
            self._metrics.count_error("kv")
            log.error("the KV accounts are wrong, blocks may be lost: %s", fault)

    def fail_all(self, error: EngineError) -> None:
        """End every open request with `error`: the loop is over. Nothing that is broken keeps one open."""
        for request in self._requests.all():
            try:
                self._batcher.finish(request.request_id, FinishReason.ERROR)
            except Exception:
                log.exception("a request could not be taken from the scheduler")
            self._requests.finish(request, Ending(FinishReason.ERROR, error))

    async def _step(self) -> None:
        started = self._clock()
        self._wake.clear()  # what is noted from here on must not be waited for
        self._metrics.begin_step(started)
        self._report(started)
        self._run_ahead.choose_arm(len(self._batcher.running))
        ahead, self._ahead = self._ahead, None
        began = started if ahead is None else self._landed_at  # when the device was done with the last one
        decision = self._decision = ahead or await self._decide()
        if decision.inputs is None and not decision.preempted and self._batcher.waits_for_disk:
            self._watchdog.note_rest()  # however slow the disk is, no step hangs
            await self._wake.wait()
        elif decision.inputs is None:
            self._empty_steps += 1
            if self._empty_steps > MAX_EMPTY_STEPS:
                raise EngineDead("The scheduler has work but schedules none of it.")
        else:
            self._empty_steps = 0
            if ahead is None:
                self._pipeline.launch(decision.inputs)
            else:
                self._run_ahead.draft_inline()
            self._run_ahead.beside_step(self._expected_s(decision))
            self._launch_ahead(decision)
            result = await self._read(decision)
            await self._run_ahead.settle(None if result is None else result.forward_s + result.sample_s)
            self._carry_out_endings()
            if result is not None:
                self._landed_at = self._clock()
                self._take(decision, result, started)
                seats = len(decision.scheduled) / self._batcher.config.max_num_seqs
                self._metrics.end_step(decision, self._landed_at - began, seats, self._batcher.kv.usage)
        num_ended, self._num_ended = self._num_ended, self._requests.num_ended
        self._drain_rate.observe(self._num_ended - num_ended, self._clock() - started)
        self._decision = None

    async def _decide(self) -> BatchDecision:
        """Decide the next step, once the drafts are there that it waits for; endings are carried out then."""
        while await self._run_ahead.draft_once():
            self._carry_out_endings()
        while (late := self._batcher.hopeless()) is not None:  # before anything is computed for it
            ending = Ending(FinishReason.DEADLINE, deadline_too_soon(late, self._clock()))
            self._carry_out(late.request_id, ending)
        decision = self._batcher.step()
        if decision.preempted:
            self._metrics.preemptions["recompute"] += len(decision.preempted) - len(decision.swapped)
            self._metrics.preemptions["swap"] += len(decision.swapped)
        return decision

    def _expected_s(self, decision: BatchDecision) -> float | None:
        """What the step should take; None for one that reads prompts, or while nothing is known."""
        if decision.num_prefill_tokens:
            return None
        return self._decoder.costs.seconds(len(decision.scheduled), decision.num_tokens)

    def _launch_ahead(self, decision: BatchDecision) -> None:
        """Have the device go on with the step behind this one, if it can be decided already."""
        if not self._pipeline.can_launch_ahead or self._endings or self.is_stopping:
            return
        if self._batcher.hopeless() is not None:
            return  # it ends before the next step, see `_decide`
        ahead = self._batcher.step_ahead(decision)
        if ahead is not None and ahead.inputs is not None:
            self._pipeline.launch(ahead.inputs)
            self._ahead = ahead

    def _draw_ahead(self) -> None:
        """Have the step ahead drawn if that waited for what is committed now; its pass runs already."""
        ahead = self._ahead
        if ahead is not None and ahead.inputs is not None and ahead.inputs.is_drawn_later:
            self._pipeline.draw(self._batcher.sampling_ahead(ahead))

    async def _drop_ahead(self) -> BatchDecision | None:
        """Wait until the device is done with the step ahead, if there is any, and take nothing of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            try:
                await self._pipeline.read()
            except Exception as error:
                release_frames(error)
        return ahead

    def _take(self, decision: BatchDecision, result: StepResult, started: float) -> None:
        """Commit and deliver what a step came to, and learn from it; its iteration began at `started`."""
        committed = self._batcher.commit(decision, result.rows)
        self._draw_ahead()
        if result.features is not None:
            for scheduled, features in zip(decision.scheduled, result.features, strict=True):
                if features is not None:
                    self._decoder.keep_features(scheduled, features)
        num_seqs = 0 if decision.num_prefill_tokens else len(decision.scheduled)
        self._run_ahead.after_step(num_seqs, len(committed), self._clock() - started)
        self._deliver_prompts(decision, result)
        self._deliver(committed, result.rows, self._landed_at)
        self._learn_costs(decision, result, started)

    def _learn_costs(self, decision: BatchDecision, result: StepResult, started: float) -> None:
        """Tell what the pass took, and the step by the clock: drafts cost the host, too.

        What was waited for drafts is counted where it is decided whether to wait.
        """
        rates, num_drafts = self._batcher.rates, decision.num_draft_tokens
        pass_s = result.forward_s + result.sample_s
        if num_drafts:
            self._metrics.verify_duration.observe(pass_s)
        else:
            rates.observe(decision.num_prefill_tokens, decision.num_decode_tokens, pass_s)
        rates.observe_clock(decision.num_decode_tokens, self._clock() - started)
        if result.swap_bytes:
            rates.observe_swap(result.swap_bytes, result.swap_s)
        if not decision.num_prefill_tokens:
            step_s = max(pass_s, self._clock() - started - self._decoder.gain.waited_s)
            num_seqs = len(decision.scheduled)
            self._decoder.observe_pass(num_seqs, decision.num_tokens, num_drafts, pass_s, step_s)

    async def _read(self, decision: BatchDecision) -> StepResult | None:
        """The result of the flying pass; None when it failed and its requests were dealt with."""
        try:
            result = await self._pipeline.read()
        except Exception as error:
            log.exception("a forward pass failed")
            release_frames(error)
            if not self._batcher.is_isolating:  # else it is the same fault once more
                self._metrics.count_error("forward")
            self._failed_passes += 1
            await self._drop_ahead()
            if isinstance(error, DeviceLost):  # no pass can go well any more
                self._batcher.abandon(decision)
                raise
            if isinstance(error, OutOfDeviceMemory) and self._failed_passes == 1:
                self._failed_batches += 1
                self._batcher.preempt_for_memory(decision)  # tried once more, with fewer requests
                return None
            self._carry_out_endings()
            self._blame(self._batcher.isolate(decision), error)
            if self._failed_batches >= MAX_FAILED_BATCHES:
                raise
            return None
        self._failed_passes = self._failed_batches = 0
        return result

    def _blame(self, requests: Sequence[Request], error: Exception) -> None:
        """End the requests that a fault of the forward pass was found to follow, or follows none of."""
        if not requests:
            return
        blamed = "request" if len(requests) == 1 else "batch"
        self._metrics.forward_faults[blamed] += 1
        log.error("forward passes fail with a %s: %d ended, others go on", blamed, len(requests))
        self._failed_batches += not self._batcher.is_isolating
        if self._failed_batches >= MAX_FAILED_BATCHES:
            return  # they end with the engine
        failure = RequestFailed(f"the forward pass failed ({type(error).__name__})", "forward")
        for request in requests:
            self._requests.finish(request, Ending(FinishReason.ERROR, failure))

    def _deliver_prompts(self, decision: BatchDecision, result: StepResult) -> None:
        """Hand the log-probabilities of prompt tokens to the streams of those that asked."""
        rows = None if decision.inputs is None else decision.inputs.prompt_rows
        if rows is None:
            return
        starts = np.flatnonzero(np.diff(rows.sequence, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(rows.sequence)], strict=True):
            scheduled = decision.scheduled[rows.sequence[start]]
            request = self._requests.get(scheduled.request_id)
            if request is None:
                continue  # ended while the step ran
            records = [record for record in result.prompt_logprobs[start:end] if record is not None]
            if len(records) < end - start:
                self._fail(request, "sampler", "the prompt could not be scored", request.num_prompt_tokens)
            else:
                stream = self._requests.stream(request.request_id)
                stream.put_prompt_logprobs(scheduled.first_position, records)

    def _deliver(self, committed: list[CommittedToken], rows: SampledRows, now: float) -> None:
        """Hand each token to its stream; end what has ended. One request's fault stays with that request."""
        logprobs = rows.logprobs
        num_delivered = 0
        for token in committed:
            if token.request.request_id not in self._requests:
                continue  # an earlier token of this step ended it
            if token.error is not None:
                self._fail(token.request, "sampler", token.error)
                continue
            num_delivered += not token.request.scores_only
            try:
                stop = self._requests.put(token, logprobs[token.row] if logprobs is not None else None, now)
            except Exception as error:
                log.error("the output of a request could not be decoded", extra=frames_of(error))
                self._fail(token.request, "detokenizer", "the output could not be decoded", token.num_tokens)
                continue
            if stop is not None or token.finish_reason is not None:
                self._finish(token, stop)
        self._requests.gaps.end_step(now)
        if self._ahead is None and self._pipeline.can_launch_ahead and self._run_ahead.is_awaited:
            self._requests.turns.hold_for_drafts()
        self._requests.turns.begin()
        self._metrics.generation_tokens += num_delivered

    def _finish(self, token: CommittedToken, stop: str | None) -> None:
        """End a request by its own terms: a stop string, a stop token, or its length."""
        request, reason = token.request, token.finish_reason
        if reason is None:
            self._batcher.finish(request.request_id, FinishReason.STOP)
            request.cut(token.num_tokens)  # those of this step behind the stop string
        if stop is not None:
            self._requests.finish(request, Ending(FinishReason.STOP, stop_reason=stop))
        elif reason is not None:
            asked_for = reason is FinishReason.STOP and token.token_id in request.sampling.stop_token_ids
            ending = Ending(reason, stop_reason=token.token_id if asked_for else None)
            self._requests.finish(request, ending)

    def _fail(self, request: Request, stage: str, message: str, num_tokens: int | None = None) -> None:
        """End a request by a fault of ours, of its tokens those behind the first `num_tokens` undelivered."""
        log.warning("a request failed: %s", message)
        self._metrics.count_error(stage)
        self._batcher.finish(request.request_id, FinishReason.ERROR)
        if num_tokens is not None:
            request.cut(num_tokens)
        self._requests.finish(request, Ending(FinishReason.ERROR, RequestFailed(message, stage)))

    def _report(self, now: float) -> None:
        """Say what the last minute was like, once a minute while there is work."""
        if now < self._next_report:
            return
        self._next_report = now + REPORT_EVERY_S
        activity = self._metrics.last_minute(now)
        if activity.num_steps and log.isEnabledFor(logging.DEBUG):
            gain = self._decoder.gain
            drafts = {"draft_speedup": round(gain.speedup, 4), **gain.terms.figures()}
            log.debug("the last minute", extra={**activity.figures(), **drafts})

    def _carry_out_endings(self) -> None:
        endings, self._endings = self._endings, {}
        for request_id, ending in endings.items():
            self._carry_out(request_id, ending)

    def _carry_out(self, request_id: str, ending: Ending) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return  # it ended by itself first
        self._batcher.finish(request_id, ending.reason)
        self._requests.finish(request, ending)
