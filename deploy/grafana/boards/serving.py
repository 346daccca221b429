"""What users of an LLM server look at first, in the order that they know from vLLM's dashboard."""

from __future__ import annotations

from deploy.grafana.panels import Board, Panel, Query, Row, heatmap, lines, stat
from deploy.grafana.queries import buckets, quantile, quantiles, rate, ratio, series, split, total

FULL = (("green", None), ("orange", 0.9), ("red", 0.98))


def _at_a_glance() -> tuple[Panel, ...]:
    return (
        stat("Requests", "Requests that ended, for whatever reason.", "reqps", rate("requests_total")),
        stat("Output", "Generated tokens a second.", "count:tok/s", rate("generation_tokens_total")),
        stat(
            "First token, P95",
            "From arrival to the first token: queueing and prefill.",
            "s",
            quantile(0.95, "time_to_first_token_seconds"),
        ),
        stat(
            "Next token, P95",
            "Between two tokens of one request.",
            "s",
            quantile(0.95, "inter_token_latency_seconds"),
        ),
        stat("Running", "Requests that hold K/V blocks now.", "short", total("num_requests_running")),
        stat(
            "Waiting",
            "Requests in the queue now.",
            "short",
            total("num_requests_waiting"),
            (("green", None), ("orange", 16), ("red", 64)),
        ),
        stat(
            "K/V in use",
            "Referenced blocks over all, of the fullest instance.",
            "percentunit",
            f"max({series('kv_cache_usage_ratio')})",
            FULL,
        ),
        stat(
            "Speed by drafts",
            "Tokens in a step's time, over those without drafts: 2 is twice as fast, 1 as fast or not tried.",
            "short",
            f"avg({series('speculation_speedup_ratio')})",
        ),
    )


def _latency_and_load() -> tuple[Panel, ...]:
    return (
        lines(
            "E2E request latency",
            "From arrival to the end of the reply.",
            "s",
            *quantiles("e2e_request_latency_seconds"),
        ),
        lines(
            "Token throughput",
            "Prompt tokens of finished requests, cached ones included, and generated tokens.",
            "count:tok/s",
            Query(rate("prompt_tokens_total"), "prompt"),
            Query(rate("generation_tokens_total"), "generation"),
        ),
        lines(
            "Inter-token latency",
            "Between two tokens of one request, as it is felt while a reply streams.",
            "s",
            *quantiles("inter_token_latency_seconds"),
        ),
        lines(
            "Scheduler state",
            "Requests that run, wait, and wait with their K/V in host memory.",
            "short",
            Query(total("num_requests_running"), "running"),
            Query(total("num_requests_waiting"), "waiting"),
            Query(total("num_requests_swapped"), "swapped"),
        ),
        lines(
            "Time to first token",
            "From arrival to the first token. Queue time is part of it.",
            "s",
            *quantiles("time_to_first_token_seconds"),
        ),
        lines(
            "Cache utilization",
            "Referenced K/V blocks over all. Blocks that only keep a prefix count as free.",
            "percentunit",
            Query(series("kv_cache_usage_ratio"), "{{instance}}"),
            steps=FULL,
            top=1.0,
            lines=True,
        ),
    )


def _requests() -> tuple[Panel, ...]:
    return (
        heatmap("Request prompt length", "Tokens in a prompt.", "short", buckets("request_prompt_tokens")),
        heatmap(
            "Request generation length",
            "Tokens generated for a request.",
            "short",
            buckets("request_generation_tokens"),
        ),
        split(
            "Finish reason",
            "Why requests ended: stop and length are as asked, abort is the caller's wish.",
            "reqps",
            ("requests_total", "finish_reason"),
        ),
        lines(
            "Queue time",
            "From arrival to the first scheduled step.",
            "s",
            *quantiles("request_queue_time_seconds"),
        ),
        lines(
            "Prefill and decode time",
            "Mean seconds of a request from its first step to its first token, and from there to its last.",
            "s",
            Query(ratio("request_prefill_time_seconds_sum", "request_prefill_time_seconds_count"), "prefill"),
            Query(ratio("request_decode_time_seconds_sum", "request_decode_time_seconds_count"), "decode"),
        ),
        lines(
            "Longest generations",
            "Tokens of the longest replies, to the bound of their bucket.",
            "short",
            Query(quantile(0.95, "request_generation_tokens"), "P95"),
            Query(quantile(1, "request_generation_tokens"), "longest"),
        ),
    )


SERVING = Board(
    "slipstream-serving",
    "Slipstream / Serving",
    "Latency, throughput and load of Slipstream servers.",
    (
        Row("At a glance", _at_a_glance(), "none yet"),
        Row("Latency and load", _latency_and_load(), "No request had a token in this time."),
        Row("Requests", _requests(), "No request ended in this time."),
    ),
)
