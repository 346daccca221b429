"""OpenRequests: every accepted request and its stream, from submission to its one terminal event."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import EngineError, Overloaded
from engine.loop.reader_turns import ReaderTurns
from engine.loop.stream import Finish, RequestStream, RequestTiming
from engine.loop.time_limits import TimeLimits
from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.metrics.histogram import TokenGaps
from engine.plan.metrics.tenant_shares import TenantShares
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.in_flight import CommittedToken
from engine.plan.step_records import TokenLogprobs

GRAVITY = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.DEADLINE,
    FinishReason.ERROR,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends, by its own terms or before its last token."""

    reason: FinishReason
    error: EngineError | None = None
    abort: str | None = None  # its label in request_aborts; None for a fault, or if nothing is to be computed
    stop_reason: str | int | None = None  # see Finish


class RequestCounts:
    """Counts what becomes of requests; nothing else writes these fields of the metrics. Loop thread only.

    A reply's choices are one request: started with the first, finished with the last. The outcome counted is
    the gravest of its choices', the first of equals.
    """

    def __init__(self, metrics: BatchMetrics) -> None:
        self._metrics = metrics
        self._group_of: dict[str, str] = {}
        self._num_open: Counter[str] = Counter()
        self._gravest: dict[str, Ending] = {}

    def open(self, request_id: str, group: str | None) -> None:
        """A choice of `group` was accepted; None is a group of its own."""
        name = self._group_of[request_id] = request_id if group is None else group
        if not self._num_open[name]:
            self._metrics.requests_started += 1
        self._num_open[name] += 1

    def choices_beside(self, request_id: str) -> list[str]:
        """The choices of a choice's group, itself included; none unless all that were opened still are.

        O(open).
        """
        name = self._group_of.get(request_id)
        if name in self._gravest:
            return []
        return [other for other, group in self._group_of.items() if group == name]

    def ended_beside(self, request_id: str) -> Ending | None:
        """How choices of an open one's group have ended, the gravest of them; None while all are open."""
        return self._gravest.get(self._group_of[request_id])

    def close(self, request_id: str, ending: Ending) -> None:
        """A choice has ended; with the last one its group has."""
        name = self._group_of.pop(request_id)
        gravest = max(self._gravest.pop(name, ending), ending, key=lambda each: GRAVITY.index(each.reason))
        self._num_open[name] -= 1
        if self._num_open[name]:
            self._gravest[name] = gravest
            return
        del self._num_open[name]
        metrics = self._metrics
        metrics.requests_finished[gravest.reason] += 1
        metrics.deadlines_missed += gravest.reason is FinishReason.DEADLINE
        if gravest.abort is not None:
            metrics.request_aborts[gravest.abort] += 1
        if isinstance(gravest.error, Overloaded) and gravest.error.code in ("queue_timeout", "queue_full"):
            metrics.requests_rejected[gravest.error.code] += 1

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count an Overloaded that is raised inside: what it refuses was never started."""
        try:
            yield
        except Overloaded as refusal:
            self._metrics.requests_rejected[refusal.code] += 1
            raise

    def miss_deadline(self) -> None:
        """A request was refused because its deadline has passed or cannot be met; it was never started."""
        self._metrics.deadlines_missed += 1
        self._metrics.requests_rejected["deadline_exceeded"] += 1


class OpenRequests:
    """Pairs each request with its stream, which only `finish` ends, and counts what happens to it."""

    def __init__(
        self,
        metrics: BatchMetrics,
        counts: RequestCounts,
        clock: Callable[[], float],
        time_limits: TimeLimits,
    ) -> None:
        self._metrics = metrics
        self._counts = counts
        self._clock = clock
        self._time_limits = time_limits
        self.shares = TenantShares(clock)
        self.turns = ReaderTurns()
        self.gaps = TokenGaps(metrics.inter_token_latency)  # to be told of each step's end
        self.num_ended = 0  # choices, since the start
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, RequestStream] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        """The open request, or None when there is none of that id any more."""
        return self._requests.get(request_id)

    def all(self) -> list[Request]:
        """Every open request, oldest first; a copy."""
        return list(self._requests.values())

    def reply_of(self, request_id: str) -> list[Request]:
        """The requests of the reply that one belongs to; none if one has ended, nor of what is read ahead."""
        return [self._requests[choice] for choice in self._counts.choices_beside(request_id)]

    def has_begun(self, request_id: str) -> bool:
        """True once a step has computed for any choice of the reply that an open one belongs to. O(open)."""
        ended = self._counts.ended_beside(request_id)
        if ended is not None:
            return ended.reason is not FinishReason.ABORT
        return any(choice.first_scheduled_time is not None for choice in self.reply_of(request_id))

    async def wait_until_none(self) -> None:
        """Return when no request is open."""
        await self._none_open.wait()

    def open(self, request: Request, stream: RequestStream, group: str | None = None) -> None:
        """Take a request that was accepted, as one of its group's choices. Its time is yet to be watched."""
        self._counts.open(request.request_id, group)
        self._requests[request.request_id] = request
        self._streams[request.request_id] = stream
        self._none_open.clear()

    def put(self, token: CommittedToken, logprobs: TokenLogprobs | None, now: float) -> str | None:
        """Hand a committed token to its stream; the stop string it completes. Raises what decoding does."""
        request = token.request
        stream = self._streams[request.request_id]
        if stream.first_token_time is None:
            stream.first_token_time = now
            self._metrics.time_to_first_token.observe(now - request.arrival_time)
            self._count_prompt(request)
        else:
            self.gaps.add(stream.last_token_time, now)
        stream.last_token_time = now
        by_id = token.finish_reason is FinishReason.STOP and token.token_id in request.stop_token_ids
        shown = not by_id or request.shows_stop(token.token_id)
        num_accepted = 0 if request.spec_stats is None else request.spec_stats.num_accepted
        return stream.put(token.token_id, logprobs, shown=shown, num_accepted=num_accepted)

    def stream(self, request_id: str) -> RequestStream:
        """The stream of an open request."""
        return self._streams[request_id]

    def finish(self, request: Request, ending: Ending) -> None:
        """Close a request: terminal event to its stream, figures to the metrics, or nothing without one."""
        stream = self._streams.pop(request.request_id, None)
        if stream is None:
            return  # it was to read ahead
        del self._requests[request.request_id]
        self._time_limits.forget(request.request_id)
        self.num_ended += 1
        timing = self._timing(request, stream)
        self._counts.close(request.request_id, ending)
        self._count(request, timing)
        self.shares.count(request.tenant, request.num_tokens)
        if not self._requests:
            self._none_open.set()
        stream.finish(
            Finish(
                reason=ending.reason,
                stop_reason=ending.stop_reason,
                error=ending.error,
                num_prompt_tokens=request.reported_prompt_tokens,
                num_output_tokens=request.reported_output_tokens,
                num_cached_tokens=request.num_cached_tokens,
                timing=timing,
                speculation=request.spec_stats,
            )
        )

    def _timing(self, request: Request, stream: RequestStream) -> RequestTiming:
        scheduled, first = request.first_scheduled_time, stream.first_token_time
        generation_s = 0.0 if first is None else stream.last_token_time - first
        num_gaps = request.num_output_tokens - 1
        return RequestTiming(
            queue_s=(self._clock() if scheduled is None else scheduled) - request.arrival_time,
            time_to_first_token_s=None if first is None else first - request.arrival_time,
            generation_s=generation_s,
            mean_itl_s=None if first is None or num_gaps < 1 else generation_s / num_gaps,
            preemptions=tuple((at - request.arrival_time, mode) for at, mode in request.preemptions),
        )

    def _count_prompt(self, request: Request) -> None:
        """All of it has been computed, or found."""
        metrics = self._metrics
        metrics.prompt_tokens += request.reported_prompt_tokens
        metrics.prompt_tokens_cached += request.num_cached_tokens
        if request.block_hashes:  # looked for
            metrics.prefix_cache_queries += request.num_prompt_tokens
            metrics.prefix_cache_hits += request.num_cached_tokens

    def _count(self, request: Request, timing: RequestTiming) -> None:
        metrics = self._metrics
        metrics.e2e_request_latency.observe(self._clock() - request.arrival_time)
        metrics.request_queue_time.observe(timing.queue_s)
        if timing.time_to_first_token_s is not None:
            metrics.request_prefill_time.observe(timing.time_to_first_token_s - timing.queue_s)
            metrics.request_decode_time.observe(timing.generation_s)
        metrics.request_prompt_tokens.observe(request.reported_prompt_tokens)
        metrics.request_generation_tokens.observe(request.reported_output_tokens)
        metrics.request_preemptions.observe(request.num_preemptions)
