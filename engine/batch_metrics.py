"""BatchMetrics: what the engine counts about itself, as plain numbers.

Written on the loop thread once a step and once a request; read by whoever exports it. Knows no Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from engine.request import FinishReason
from engine.speculation.spec_stats import SpecStats

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


class Histogram:
    """Counts of observations at or below each bound, plus their sum; the last count is above every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self.counts)


def _latency() -> Histogram:
    return Histogram(LATENCY_BOUNDS_S)


def _token_latency() -> Histogram:
    return Histogram(TOKEN_LATENCY_BOUNDS_S)


def _token_counts() -> Histogram:
    return Histogram(TOKEN_COUNT_BOUNDS)


@dataclass(slots=True)
class BatchMetrics:
    """Running totals since the start; never reset. Seconds and tokens throughout.

    `requests_finished` counts each accepted request once, so that started = finished by reason at rest.
    """

    requests_started: int = 0
    requests_finished: Counter[FinishReason] = field(default_factory=Counter)
    requests_rejected: Counter[str] = field(default_factory=Counter)  # by the code of Overloaded
    request_aborts: Counter[str] = field(default_factory=Counter)  # disconnect, cancel, drain, timeout
    preemptions: Counter[str] = field(default_factory=Counter)  # recompute, swap
    deadlines_missed: int = 0  # requests ended by their deadline, or refused because they could not meet it
    engine_errors: Counter[str] = field(default_factory=Counter)  # by stage
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked for
    prefix_cache_hits: int = 0  # prompt tokens found
    generation_tokens: int = 0
    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=_token_latency)
    e2e_request_latency: Histogram = field(default_factory=_latency)
    request_queue_time: Histogram = field(default_factory=_latency)
    request_prefill_time: Histogram = field(default_factory=_latency)
    request_decode_time: Histogram = field(default_factory=_latency)
    request_prompt_tokens: Histogram = field(default_factory=_token_counts)
    request_generation_tokens: Histogram = field(default_factory=_token_counts)
    request_preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTION_BOUNDS))
    step_duration: dict[str, Histogram] = field(
        default_factory=lambda: {phase: _token_latency() for phase in ("prefill", "decode", "mixed")}
    )
    step_batched_tokens: Histogram = field(default_factory=_token_counts)
    speculation: SpecStats = field(default_factory=SpecStats)  # of all requests together
    draft_duration: Histogram = field(default_factory=lambda: Histogram(DRAFT_BOUNDS_S))  # a micro-step
    verify_duration: Histogram = field(default_factory=_token_latency)  # of steps that verify drafts


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What is true at this instant. A cached block is unreferenced but still holds a reusable prefix.

    The numbers of speculation are of late: drafts verified a round, the share of them that was right, and
    tokens for the time of a step against what it would be without drafts. All are 0 before the first round.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_free: int
    heartbeat_age_s: float
    speculation_draft_length: float = 0.0
    speculation_acceptance: float = 0.0
    speculation_speedup: float = 0.0

    @property
    def kv_cache_usage_ratio(self) -> float:
        """Referenced blocks over all blocks, 0 to 1."""
        total = self.kv_blocks_used + self.kv_blocks_cached + self.kv_blocks_free
        return self.kv_blocks_used / total if total else 0.0
