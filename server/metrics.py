"""GET /metrics: the engine's and the server's plain counters as Prometheus families, read at scrape time.

Names, types and labels are the contract's. Each application has its own registry; nothing is global.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, repeat

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from engine import BatchMetrics, EngineGauges, FinishReason, Histogram, SpecStats
from server.context import ServerContext
from server.health import server_version

PREFIX = "slipstream_"

# Labels that exist before their first count, so that a rate over them never starts from nothing.
_REJECTIONS = ("queue_full", "queue_timeout", "loading", "draining", "deadline_exceeded")
_ABORTS = ("disconnect", "cancel", "drain", "timeout")
_PREEMPTIONS = ("recompute", "swap")
_STAGES = ("forward", "sampler", "detokenizer")
_METHODS = ("ngram", "suffix", "prediction", "draft_model", "medusa")
_DROPS = ("stale", "cancelled", "error", "late")
_RUN_AHEADS = ("hit", "miss")
_MAX_DRAFTS = 32  # the most that may be asked for

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "Requests that hold K/V blocks.", "num_requests_running"),
    ("num_requests_waiting", "Requests in the queue.", "num_requests_waiting"),
    ("num_requests_swapped", "Preempted requests whose K/V waits in host memory.", "num_requests_swapped"),
    ("kv_cache_usage_ratio", "Referenced K/V blocks over all.", "kv_cache_usage_ratio"),
    ("engine_heartbeat_age_seconds", "Age of the running step, 0 when idle.", "heartbeat_age_s"),
    ("speculation_draft_length", "Drafted tokens verified a round, of late.", "speculation_draft_length"),
    ("speculation_acceptance_ratio", "Share of drafted tokens accepted, of late.", "speculation_acceptance"),
    ("speculation_speedup_ratio", "Tokens a step's time, over those without drafts.", "speculation_speedup"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "Prompt tokens of finished requests.", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", "prompt_tokens_cached"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found there.", "prefix_cache_hits"),
    (
        "deadline_missed",
        "Requests too late, or refused as such.",
        "deadlines_missed",
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token"),
    ("inter_token_latency_seconds", "Between two tokens of one request.", "inter_token_latency"),
    ("e2e_request_latency_seconds", "From arrival to the end.", "e2e_request_latency"),
    ("request_queue_time_seconds", "From arrival to the first scheduled step.", "request_queue_time"),
    ("request_prefill_time_seconds", "From there to the first token.", "request_prefill_time"),
    ("request_decode_time_seconds", "From the first token to the last.", "request_decode_time"),
    ("request_prompt_tokens", "Tokens in a prompt.", "request_prompt_tokens"),
    ("request_generation_tokens", "Tokens generated for a request.", "request_generation_tokens"),
    ("request_preemptions", "Times a request was preempted.", "request_preemptions"),
    ("step_batched_tokens", "Tokens computed in a step.", "step_batched_tokens"),
    ("draft_duration_seconds", "Time of one micro-step of a drafter.", "draft_duration"),
    ("verify_duration_seconds", "Time of a step that verifies drafts.", "verify_duration"),
)


class EngineCollector(Collector):
    """Reads one application's counters when it is scraped; costs nothing in between."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._model = {"model_name": context.served_names[0]}

    def collect(self) -> Iterator[Metric]:
        """Every family, at zero before the first request."""
        engine, http = self._context.engine, self._context.http
        metrics, gauges = engine.metrics, engine.gauges()
        yield from self._gauges(gauges)
        shares = [({"tenant": tenant}, share) for tenant, share in engine.tenant_shares().items()]
        yield self._gauge("tenant_share_ratio", "Share of the last minute's tokens.", shares)
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, getattr(metrics, field))
        yield self._counter("ignored_parameters", "Unknown request fields.", http.ignored_parameters)
        yield from self._labelled_counters(metrics)
        yield from self._speculation(metrics.speculation)
        yield self._http_requests()
        for name, text, field in _HISTOGRAMS:
            yield self._histogram(name, text, [({}, getattr(metrics, field))])
        steps = [({"phase": phase}, histogram) for phase, histogram in metrics.step_duration.items()]
        yield self._histogram("step_duration_seconds", "Time of one step.", steps)
        yield self._info("build", "The server's version.", {"version": server_version()})
        yield self._info("cache_config", "The K/V cache as it was sized.", self._cache_config())

    def _gauges(self, gauges: EngineGauges) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            yield self._gauge(name, text, [({}, getattr(gauges, field))])
        blocks = [
            ({"state": "used"}, gauges.kv_blocks_used),
            ({"state": "cached"}, gauges.kv_blocks_cached),
            ({"state": "free"}, gauges.kv_blocks_free),
        ]
        yield self._gauge("kv_cache_blocks", "K/V blocks by state.", blocks)

    def _labelled_counters(self, metrics: BatchMetrics) -> Iterator[Metric]:
        finished = {reason.value: metrics.requests_finished[reason] for reason in FinishReason}
        yield self._counters("requests", "Requests finished.", "finish_reason", finished)
        rejected = _with_zeros(metrics.requests_rejected, _REJECTIONS)
        yield self._counters("requests_rejected", "Requests refused before any work.", "reason", rejected)
        aborts = _with_zeros(metrics.request_aborts, _ABORTS)
        yield self._counters("request_aborts", "Requests ended from outside.", "reason", aborts)
        preemptions = _with_zeros(metrics.preemptions, _PREEMPTIONS)
        yield self._counters("preemptions", "Running requests that gave their K/V back.", "mode", preemptions)
        errors = _with_zeros(metrics.engine_errors, _STAGES)
        yield self._counters("engine_errors", "Faults of ours by where they happened.", "stage", errors)

    def _speculation(self, stats: SpecStats) -> Iterator[Metric]:
        """The names are vLLM's where it has the same; so is counting positions from 0."""
        yield self._counter(
            "spec_decode_num_drafts", "Rounds in which drafts were verified.", stats.num_rounds
        )
        yield self._counter(
            "spec_decode_n1_fallbacks", "Decodes of a model that cannot be rewound.", stats.num_fallbacks
        )
        accepted = [*stats.accepted_per_position, *repeat(0, _MAX_DRAFTS)][:_MAX_DRAFTS]
        positions = {str(position): count for position, count in enumerate(accepted)}
        for name, text, label, counts in (
            ("num_draft_tokens", "Drafted tokens verified.", "method", _with_zeros(stats.proposed, _METHODS)),
            (
                "num_accepted_tokens",
                "Drafted tokens accepted.",
                "method",
                _with_zeros(stats.accepted, _METHODS),
            ),
            ("num_accepted_tokens_per_pos", "Rounds that accepted this position.", "position", positions),
            ("draft_tokens_dropped", "Drafted in vain.", "reason", _with_zeros(stats.dropped, _DROPS)),
            ("run_ahead", "Rounds drafted past.", "result", _with_zeros(stats.run_ahead, _RUN_AHEADS)),
        ):
            yield self._counters(f"spec_decode_{name}", text, label, counts)

    def _http_requests(self) -> Metric:
        family = CounterMetricFamily(PREFIX + "http_requests", "HTTP requests answered.")
        for (route, code), count in sorted(self._context.http.requests.items()):
            labels = {**self._model, "route": route, "code": str(code)}
            family.add_sample(PREFIX + "http_requests_total", labels, count)
        return family

    def _cache_config(self) -> dict[str, str]:
        info = self._context.info
        if info is None:
            return {}
        return {"block_size": str(info.kv_block_size), "num_blocks": str(info.num_kv_blocks)}

    def _gauge(self, name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text)
        for labels, value in samples:
            family.add_sample(PREFIX + name, {**self._model, **labels}, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text)
        family.add_sample(f"{PREFIX}{name}_total", dict(self._model), value)
        return family

    def _counters(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text)
        for value, count in counts.items():
            family.add_sample(f"{PREFIX}{name}_total", {**self._model, label: value}, count)
        return family

    def _histogram(
        self, name: str, text: str, histograms: Iterable[tuple[Mapping[str, str], Histogram]]
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text)
        for labels, histogram in histograms:
            own = {**self._model, **labels}
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            totals = list(accumulate(histogram.counts))
            for bound, total in zip(bounds, totals, strict=True):
                family.add_sample(f"{PREFIX}{name}_bucket", {**own, "le": bound}, total)
            family.add_sample(f"{PREFIX}{name}_count", own, totals[-1])
            family.add_sample(f"{PREFIX}{name}_sum", own, histogram.sum)
        return family

    def _info(self, name: str, text: str, facts: Mapping[str, str]) -> Metric:
        """A gauge of value 1 whose labels are the facts; no sample while there are none."""
        return self._gauge(f"{name}_info", text, [(facts, 1.0)] if facts else [])


def _with_zeros(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    return {**dict.fromkeys(names, 0), **counts}


def metrics_router(context: ServerContext) -> APIRouter:
    """The route over a registry of this application's own."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(context))
    ProcessCollector(registry=registry)
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics when the scraper asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return router
