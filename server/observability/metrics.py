"""GET /metrics: the engine's and the server's plain counters as Prometheus families, read at scrape time.

Names, types and labels are the contract's. Nothing is global: each application has a page of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import cast

from fastapi import APIRouter
from prometheus_client import ProcessCollector
from starlette.requests import Request
from starlette.responses import Response

from engine import BatchMetrics, DraftingState, EmbeddingMetrics, EngineGauges, FinishReason, SpecStats
from server.http.context import ServerContext
from server.observability.exposition import (
    OPENMETRICS,
    OPENMETRICS_END,
    TEXT,
    Exposition,
    Kind,
    Labels,
    SeriesNames,
    accepts_openmetrics,
)
from server.observability.health import server_version

PREFIX = "slipstream_"

# Labels that exist before their first count, so that a rate over them never starts from nothing.
_REJECTIONS = ("queue_full", "queue_timeout", "loading", "draining", "deadline_exceeded")
_ABORTS = ("disconnect", "cancel", "drain", "timeout", "displaced")
_PREEMPTIONS = ("recompute", "swap")
_BLAMED = ("request", "batch")
_STAGES = (
    "tokenizer",
    "grammar",
    "forward",
    "sampler",
    "detokenizer",
    "drafter",
    "embedding",
    "watchdog",
    "kv",
    "disk",
)
_METHODS = ("ngram", "suffix", "prediction", "draft_model", "medusa", "heads", "mtp")
_DROPS = ("stale", "cancelled", "error", "late")
_RUN_AHEADS = ("hit", "lane", "miss")
_MAX_DRAFTS = 32  # the most that may be asked for

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "Requests that hold K/V blocks.", "num_requests_running"),
    ("num_requests_waiting", "Requests in the queue, preempted ones included.", "num_requests_waiting"),
    ("num_requests_swapped", "Preempted requests whose K/V waits in host memory.", "num_requests_swapped"),
    ("kv_cache_usage_ratio", "Referenced K/V blocks over all.", "kv_cache_usage_ratio"),
    ("engine_heartbeat_age_seconds", "Age of the running step, 0 when idle.", "heartbeat_age_s"),
    (
        "speculation_draft_length",
        "Drafted tokens verified a round, of late; 0 before the first.",
        "speculation_draft_length",
    ),
    (
        "speculation_acceptance_ratio",
        "Share of drafted tokens accepted, of late; 0 before the first.",
        "speculation_acceptance",
    ),
    (
        "speculation_speedup_ratio",
        "Tokens a step's time over those without drafts, measured of late; 1 before the first round.",
        "speculation_speedup",
    ),
    (
        "speculation_theoretical_speedup_ratio",
        "The same by Leviathan et al.'s formula, from acceptance, length and cost of drafts of late: as if "
        "verifying cost nothing and drafts were accepted independently; 1 before the first round.",
        "speculation_theoretical_speedup",
    ),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "Prompt tokens, counted with a request's first token.", "prompt_tokens"),
    ("prompt_tokens_cached", "Those of them that the prefix cache held.", "prompt_tokens_cached"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found there.", "prefix_cache_hits"),
    (
        "prefix_cache_disk_read_blocks",
        "Blocks of K/V read from prefix-cache-dir.",
        "prefix_cache_disk_read_blocks",
    ),
    (
        "prefix_cache_disk_written_blocks",
        "Blocks of K/V written there.",
        "prefix_cache_disk_written_blocks",
    ),
    ("deadline_missed", "Requests ended by their deadline, or refused for it.", "deadlines_missed"),
)
_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token"),
    (
        "inter_token_latency_seconds",
        "From one output of a request to its next, shared equally among the tokens of the latter: one "
        "observation a token but the first. The sum over the count is the time a token takes.",
        "inter_token_latency",
    ),
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


class MetricsPage:
    """Reads one application's counters when it is scraped; costs nothing in between."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._names = SeriesNames(PREFIX, {"model_name": context.served_names[0]})
        self._process = ProcessCollector(registry=None)
        self._process_names = SeriesNames("", {})

    def render(self, *, openmetrics: bool) -> bytes:
        """Every family, at zero before the first request; in about half a millisecond."""
        ours = Exposition(self._names, openmetrics=openmetrics)
        self._write(ours)
        process = Exposition(self._process_names, openmetrics=openmetrics)
        self._write_process(process)
        end = OPENMETRICS_END if openmetrics else ""
        return f"{ours.text()}{process.text()}{end}".encode()

    def _write(self, page: Exposition) -> None:
        engine, http = self._context.engine, self._context.http
        metrics = engine.metrics
        _write_gauges(page, engine.gauges())
        text = "1 while a drafter is asked for drafts, 0 while it is off or was not loaded."
        page.add("speculation_enabled", "gauge", text, _by("drafter", _enabled(engine.drafting())))
        shares = engine.controls.tenant_shares()
        page.add("tenant_share_ratio", "gauge", "Share of the last minute's tokens.", _by("tenant", shares))
        for name, text, field in _COUNTERS:
            _add(page, name, "counter", text, getattr(metrics, field))
        text = "Tokens of chats' next prompts computed in idle steps: found by a prompt, or dropped before."
        page.add("next_turn_tokens", "counter", text, _by("result", engine.next_turn_tokens()))
        _add(page, "ignored_parameters", "counter", "Unknown request fields.", http.ignored_parameters)
        lines = _by("status", http.batch_lines)
        page.add("batch_lines", "counter", "Lines of batches, by how they ended.", lines)
        running, waiting = http.batch_load()
        _add(page, "batch_lines_running", "gauge", "Lines of batches that run.", running)
        _add(page, "batch_lines_waiting", "gauge", "Lines of open batches without a seat.", waiting)
        _write_labelled_counters(page, metrics)
        _write_speculation(page, metrics.speculation)
        answered = (
            ((("code", str(code)), ("route", route)), count) for (route, code), count in http.requests.items()
        )
        page.add("http_requests", "counter", "HTTP requests answered.", answered)
        for name, text, field in _HISTOGRAMS:
            page.add_histograms(name, text, [((), getattr(metrics, field))])
        self._write_embeddings(page)
        formats = {} if self._context.info is None else self._context.info.weight_bytes
        page.add("weight_bytes", "gauge", "Memory of the weights, by format.", _by("format", formats))
        steps = (((("phase", phase),), histogram) for phase, histogram in metrics.step_duration.items())
        page.add_histograms("step_duration_seconds", "Time of one step.", steps)
        _add_facts(page, "build", "The server's version.", {"version": server_version()})
        _add_facts(page, "cache_config", "The K/V cache as it was sized, once loaded.", self._cache_config())

    def _write_embeddings(self, page: Exposition) -> None:
        """At zero where no embedding model is served."""
        service = self._context.embeddings
        found = EmbeddingMetrics() if service is None else service.metrics
        waiting = 0 if service is None else service.num_waiting
        _add(page, "num_embedding_requests_waiting", "gauge", "Requests with texts in no batch yet.", waiting)
        _add(page, "embedding_texts", "counter", "Texts and pairs embedded or scored.", found.texts)
        _add(page, "embedding_tokens", "counter", "Tokens of them.", found.tokens)
        for name, text, histogram in (
            ("request_latency_seconds", "From arrival to the vectors or scores.", found.request_latency),
            ("batch_duration_seconds", "Time of a batch, with the steps inside of it.", found.batch_duration),
            ("batch_tokens", "Tokens in a batch.", found.batch_tokens),
        ):
            page.add_histograms(f"embedding_{name}", text, [((), histogram)])

    def _write_process(self, page: Exposition) -> None:
        for family in self._process.collect():
            samples: list[tuple[Labels, float]] = [((), sample.value) for sample in family.samples]
            page.add(family.name, cast(Kind, family.type), family.documentation, samples)

    def _cache_config(self) -> dict[str, str]:
        info = self._context.info
        if info is None:
            return {}
        facts = {
            "block_size": info.kv_block_size,
            "num_blocks": info.num_kv_blocks,
            "num_gpu_blocks": info.num_kv_blocks,  # as gateways look for it, whatever the device
            "num_host_blocks": info.num_host_blocks,
            "kv_bytes": info.kv_bytes,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "dtype": info.dtype,
            "cache_dtype": info.kv_dtype,
            "device": info.device,
            "prefix_caching": str(self._context.settings.cache.prefix_caching).lower(),
        }
        return {name: str(fact) for name, fact in facts.items()}


def _write_gauges(page: Exposition, gauges: EngineGauges) -> None:
    for name, text, field in _GAUGES:
        _add(page, name, "gauge", text, getattr(gauges, field))
    blocks = {"used": gauges.kv_blocks_used, "cached": gauges.kv_blocks_cached, "free": gauges.kv_blocks_free}
    page.add("kv_cache_blocks", "gauge", "K/V blocks by state.", _by("state", blocks))


def _write_labelled_counters(page: Exposition, metrics: BatchMetrics) -> None:
    finished = {reason.value: metrics.requests_finished[reason] for reason in FinishReason}
    for name, text, label, counts in (
        ("requests", "Requests finished.", "finish_reason", finished),
        (
            "requests_rejected",
            "Requests refused before any work.",
            "reason",
            _with_zeros(metrics.requests_rejected, _REJECTIONS),
        ),
        (
            "request_aborts",
            "Requests ended from outside.",
            "reason",
            _with_zeros(metrics.request_aborts, _ABORTS),
        ),
        (
            "preemptions",
            "Running requests that gave their K/V back.",
            "mode",
            _with_zeros(metrics.preemptions, _PREEMPTIONS),
        ),
        (
            "engine_errors",
            "Faults of ours by where they happened.",
            "stage",
            _with_zeros(metrics.engine_errors, _STAGES),
        ),
        (
            "forward_faults",
            "Failed passes put down to a request, which ended alone, or to no one of a batch.",
            "blamed",
            _with_zeros(metrics.forward_faults, _BLAMED),
        ),
    ):
        page.add(name, "counter", text, _by(label, counts))


def _write_speculation(page: Exposition, stats: SpecStats) -> None:
    """The names are vLLM's where it has the same; so is counting positions from 0."""
    rounds, fallbacks = "Rounds in which drafts were verified.", "Decodes of a model that cannot be rewound."
    _add(page, "spec_decode_num_drafts", "counter", rounds, stats.num_rounds)
    _add(page, "spec_decode_n1_fallbacks", "counter", fallbacks, stats.num_fallbacks)
    accepted = [*stats.accepted_per_position, *repeat(0, _MAX_DRAFTS)][:_MAX_DRAFTS]
    positions = {str(position): count for position, count in enumerate(accepted)}
    for name, text, label, counts in (
        ("num_draft_tokens", "Drafted tokens verified.", "method", _with_zeros(stats.proposed, _METHODS)),
        ("num_accepted_tokens", "Drafted tokens accepted.", "method", _with_zeros(stats.accepted, _METHODS)),
        ("num_accepted_tokens_per_pos", "Rounds that accepted this position.", "position", positions),
        ("draft_tokens_dropped", "Drafted in vain.", "reason", _with_zeros(stats.dropped, _DROPS)),
        (
            "run_ahead",
            "Rounds that were drafted past: rightly, for another outcome as well, or in vain.",
            "result",
            _with_zeros(stats.run_ahead, _RUN_AHEADS),
        ),
    ):
        page.add(f"spec_decode_{name}", "counter", text, _by(label, counts))


def _add(page: Exposition, name: str, kind: Kind, text: str, value: float) -> None:
    page.add(name, kind, text, [((), value)])


def _add_facts(page: Exposition, name: str, text: str, facts: Mapping[str, str]) -> None:
    """One series of value 1 whose labels are the facts; none while there are no facts."""
    page.add(name, "info", text, [(tuple(facts.items()), 1)] if facts else [])


def _by(label: str, counts: Mapping[str, float]) -> Iterable[tuple[Labels, float]]:
    return [(((label, name),), count) for name, count in counts.items()]


def _enabled(state: DraftingState | None) -> dict[str, int]:
    drafters = () if state is None else state.drafters
    return _with_zeros({each.method: int(each.why_off is None) for each in drafters}, _METHODS)


def _with_zeros(counts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    return {**dict.fromkeys(names, 0), **counts}


def metrics_router(context: ServerContext) -> APIRouter:
    """The route over a page of this application's own."""
    page = MetricsPage(context)
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        """Prometheus text, or OpenMetrics when the scraper asks for it."""
        openmetrics = accepts_openmetrics(request.headers.get("accept", ""))
        kind = OPENMETRICS if openmetrics else TEXT
        return Response(page.render(openmetrics=openmetrics), headers={"content-type": kind})

    return router
