"""Whether memory is what is short, and what the prefix cache saves."""

from __future__ import annotations

from dataclasses import replace

from deploy.grafana.boards.serving import FULL
from deploy.grafana.panels import Board, Panel, Query, Row, lines, stat
from deploy.grafana.queries import rate, ratio, series, split, total


def _at_a_glance() -> tuple[Panel, ...]:
    size = stat("Size", "Blocks and tokens a block.", "short", series("cache_config_info"))
    return (
        stat(
            "In use",
            "Referenced blocks over all, of the fullest instance.",
            "percentunit",
            f"max({series('kv_cache_usage_ratio')})",
            FULL,
        ),
        replace(
            size,
            queries=(Query(series("cache_config_info"), "{{num_blocks}} × {{block_size}}"),),
            show_names=True,
        ),
        stat("Blocks in use", "Blocks that a request holds.", "short", _blocks("used")),
        stat(
            "Blocks that keep a prefix",
            "Unreferenced, reusable, given away when needed.",
            "short",
            _blocks("cached"),
        ),
        stat(
            "Prefix hits", "Share of the prompt tokens looked for that were cached.", "percentunit", _hits()
        ),
        stat(
            "Prompt tokens saved",
            "Prompt tokens a second that needed no prefill.",
            "count:tok/s",
            rate("prompt_tokens_cached_total"),
        ),
        stat("Waiting", "Requests in the queue: with a full cache, waiting for memory.", "short", _waiting()),
        stat(
            "Preemptions a request",
            "Requests that lose their K/V again.",
            "short",
            ratio("preemptions_total", "requests_total"),
            (("green", None), ("orange", 0.1), ("red", 0.5)),
        ),
    )


def _memory() -> tuple[Panel, ...]:
    return (
        lines(
            "Utilization",
            "Referenced blocks over all.",
            "percentunit",
            Query(series("kv_cache_usage_ratio"), "{{instance}}"),
            steps=FULL,
            lines=True,
            top=1.0,
        ),
        lines(
            "Blocks by state",
            "Used by requests, kept for their prefix, free.",
            "short",
            Query(total("kv_cache_blocks", "state"), "{{state}}"),
            stacked=True,
        ),
        lines(
            "Blocks a running request",
            "How much memory a request holds on average.",
            "short",
            Query(f"{_blocks('used')} / {total('num_requests_running')}", "blocks"),
        ),
        split(
            "Preemptions by mode",
            "Requests that gave their K/V back, to be recomputed or swapped in again.",
            "ops",
            ("preemptions_total", "mode"),
            "No request was preempted in this time.",
        ),
        lines(
            "Swapped out",
            "Preempted requests whose K/V waits in host memory.",
            "short",
            Query(total("num_requests_swapped"), "requests"),
        ),
        lines(
            "Who waits for memory",
            "Requests that run and wait. Waiting while blocks are free is for seats or the token budget.",
            "short",
            Query(total("num_requests_running"), "running"),
            Query(_waiting(), "waiting"),
        ),
    )


def _prefixes() -> tuple[Panel, ...]:
    return (
        lines(
            "Prefix hits",
            "Share of the prompt tokens looked for that were cached.",
            "percentunit",
            Query(_hits(), "hits"),
            top=1.0,
        ),
        lines(
            "Prefix lookups",
            "Prompt tokens looked for in the prefix cache, and found.",
            "count:tok/s",
            Query(rate("prefix_cache_queries_total"), "looked for"),
            Query(rate("prefix_cache_hits_total"), "found"),
        ),
        lines(
            "Prompt tokens by source",
            "Computed, or taken from the cache.",
            "count:tok/s",
            Query(f"{rate('prompt_tokens_total')} - {rate('prompt_tokens_cached_total')}", "computed"),
            Query(rate("prompt_tokens_cached_total"), "cached"),
            stacked=True,
        ),
        lines(
            "Prefixes on disk",
            "Blocks read where that beats computing them, and written behind the steps.",
            "ops",
            Query(f"{rate('prefix_cache_disk_read_blocks_total')} > 0", "read"),
            Query(f"{rate('prefix_cache_disk_written_blocks_total')} > 0", "written"),
            empty="Nothing was read from disk or written there in this time; see --prefix-cache-dir.",
        ),
        split(
            "Next turns read ahead",
            "Tokens computed while the server was idle, that a prompt began with or that were dropped.",
            "count:tok/s",
            ("next_turn_tokens_total", "result"),
            "No turn was read ahead in this time.",
        ),
    )


def _blocks(state: str) -> str:
    labels = f'state="{state}"'
    return f"sum({series('kv_cache_blocks', labels)})"


def _hits() -> str:
    return ratio("prefix_cache_hits_total", "prefix_cache_queries_total")


def _waiting() -> str:
    return total("num_requests_waiting")


KV_CACHE = Board(
    "slipstream-kv-cache",
    "Slipstream / K/V cache",
    "Whether memory is what is short, and what the prefix cache saves.",
    (
        Row("At a glance", _at_a_glance(), "none yet"),
        Row("Memory", _memory(), "No request ran in this time."),
        Row("Prefixes", _prefixes(), "No prompt was looked for in the prefix cache in this time."),
    ),
)
