"""BatchMetrics: what the engine counts about itself, as plain numbers. Knows no Prometheus."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from typing import NamedTuple

from engine.plan.metrics.histogram import Histogram
from engine.plan.request import FinishReason
from engine.plan.speculation.recent_gain import NO_DRAFTS, FormulaTerms
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.step_records import BatchDecision

PHASES = ("prefill", "decode", "mixed")
_HORIZON_S = 60.0  # of what is known of late
_SNAPSHOT_S = 5.0  # how finely
LATENCY_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_LATENCY_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0),
)
DRAFT_BOUNDS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025),
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
TOKEN_COUNT_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
PREEMPTION_BOUNDS = (0.0, 1.0, 2.0, 4.0, 8.0)
_latency = partial(Histogram, LATENCY_BOUNDS_S)
_token_latency = partial(Histogram, TOKEN_LATENCY_BOUNDS_S)
_token_counts = partial(Histogram, TOKEN_COUNT_BOUNDS)


class Activity(NamedTuple):
    """What was counted up to a time of the engine's clock; a difference of two is what came in between."""

    seconds: float  # that time, or the length of the difference
    num_ended: int
    prompt_tokens: int
    generation_tokens: int
    num_sequences: int  # the sum of the batch sizes of all steps
    busy_s: float  # in steps
    seats_s: float  # in steps, times the share of seats in use
    kv_s: float  # in steps, times the share of K/V blocks in use
    step_tokens: Histogram
    time_to_first_token: Histogram
    prefill: Histogram  # seconds of the steps that computed nothing else
    decode: Histogram
    mixed: Histogram  # of those that computed both

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(*map(sub, self, earlier))

    @property
    def num_steps(self) -> int:
        """Steps that computed something."""
        return self.step_tokens.count

    def figures(self) -> dict[str, float]:
        """All of it in numbers for a log, by name; of what was observed many times the mean."""
        means = (value.mean if isinstance(value, Histogram) else value for value in self)
        return {name: round(mean, 4) for name, mean in zip(self._fields, means, strict=True)}


@dataclass(slots=True)
class BatchMetrics:
    """Running totals since the start, never reset, and what they gained of late. Seconds and tokens."""

    requests_started: int = 0
    requests_finished: Counter[FinishReason] = field(default_factory=Counter)  # each accepted one, once
    requests_rejected: Counter[str] = field(default_factory=Counter)  # by the code of Overloaded
    request_aborts: Counter[str] = field(default_factory=Counter)  # disconnect, cancel, drain, timeout
    preemptions: Counter[str] = field(default_factory=Counter)  # recompute, swap
    deadlines_missed: int = 0  # requests ended by their deadline, or refused because they could not meet it
    engine_errors: Counter[str] = field(default_factory=Counter)  # by stage
    forward_faults: Counter[str] = field(default_factory=Counter)  # by whom they follow: request, batch
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked for
    prefix_cache_hits: int = 0  # prompt tokens found
    prefix_cache_disk_read_blocks: int = 0
    prefix_cache_disk_written_blocks: int = 0
    generation_tokens: int = 0
    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=_token_latency)
    e2e_request_latency: Histogram = field(default_factory=_latency)
    request_queue_time: Histogram = field(default_factory=_latency)
    request_prefill_time: Histogram = field(default_factory=_latency)
    request_decode_time: Histogram = field(default_factory=_latency)
    request_prompt_tokens: Histogram = field(default_factory=_token_counts)
    request_generation_tokens: Histogram = field(default_factory=_token_counts)
    request_preemptions: Histogram = field(default_factory=partial(Histogram, PREEMPTION_BOUNDS))
    step_duration: dict[str, Histogram] = field(
        default_factory=lambda: {phase: _token_latency() for phase in PHASES}
    )
    step_batched_tokens: Histogram = field(default_factory=_token_counts)
    speculation: SpecStats = field(default_factory=SpecStats)  # of all requests together
    draft_duration: Histogram = field(default_factory=partial(Histogram, DRAFT_BOUNDS_S))  # a micro-step
    verify_duration: Histogram = field(default_factory=_token_latency)  # of steps that verify drafts
    num_sequences: int = 0  # of all steps together
    busy_s: float = 0.0  # in steps
    seats_s: float = 0.0  # in steps, times the share of seats in use
    kv_s: float = 0.0  # in steps, times the share of K/V blocks in use
    _first: Activity | None = None  # the totals when the first step began
    _recent: deque[Activity] = field(default_factory=deque)  # and those of the last minute

    def count_error(self, stage: str) -> None:
        """Something failed that no caller can be blamed for; `stage` says where."""
        self.engine_errors[stage] += 1

    def begin_step(self, now: float) -> None:
        """A step begins; `now` is on the engine's clock, as everywhere here."""
        if self._recent and now < self._recent[-1].seconds + _SNAPSHOT_S:
            return
        totals = self._totals(now)
        self._first = self._first or totals
        self._recent.append(totals)
        while now - self._recent[0].seconds > _HORIZON_S:
            self._recent.popleft()

    def end_step(self, decision: BatchDecision, seconds: float, seats: float, kv: float) -> None:
        """A step has been committed; `seats` and `kv` are the shares of them in use, 0 to 1."""
        if not decision.num_prefill_tokens:
            phase = "decode"
        else:
            phase = "mixed" if decision.num_decode_tokens else "prefill"
        self.step_duration[phase].observe(seconds)
        self.step_batched_tokens.observe(decision.num_tokens)
        self.num_sequences += len(decision.scheduled)
        self.busy_s += seconds
        self.seats_s += seats * seconds
        self.kv_s += kv * seconds

    def last_minute(self, now: float) -> Activity:
        """What the engine did of late, known to a few seconds; nothing if there was no step."""
        totals = self._totals(now)
        return totals - next((then for then in self._recent if now - then.seconds <= _HORIZON_S), totals)

    def since_first_step(self, now: float) -> Activity:
        """All that the engine did."""
        totals = self._totals(now)
        return totals - (self._first or totals)

    def _totals(self, now: float) -> Activity:
        return Activity(
            seconds=now,
            num_ended=self.requests_finished.total(),
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_sequences=self.num_sequences,
            busy_s=self.busy_s,
            seats_s=self.seats_s,
            kv_s=self.kv_s,
            step_tokens=self.step_batched_tokens.copy(),
            time_to_first_token=self.time_to_first_token.copy(),
            **{phase: each.copy() for phase, each in self.step_duration.items()},
        )


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What is true at this instant; of speculation, what was true of late."""

    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int
    kv_blocks_used: int
    kv_blocks_cached: int  # unreferenced, with a prefix that can be found
    kv_blocks_free: int
    heartbeat_age_s: float
    speculation_draft_length: float = 0.0  # drafts verified a round
    speculation_acceptance: float = 0.0  # the share of them that was right
    speculation_speedup: float = 1.0  # over no drafts; 1 before the first round
    formula: FormulaTerms = NO_DRAFTS

    @property
    def speculation_theoretical_speedup(self) -> float:
        """Over no drafts, by the formula; 1 before the first round."""
        return self.formula.speedup

    @property
    def kv_cache_usage_ratio(self) -> float:
        """Referenced blocks over all blocks, 0 to 1."""
        total = self.kv_blocks_used + self.kv_blocks_cached + self.kv_blocks_free
        return self.kv_blocks_used / total if total else 0.0
