"""RequestLog: one line for each request that has ended, and its trace where traces are exported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from server.api.generation import Accepted, Choice
from server.api.usage import num_cached_tokens, one_a_prompt, reply_metrics, reply_usage, spec_stats
from server.observability.ended_request import EndedRequest
from server.observability.terminal_rows import request_row

log = logging.getLogger("slipstream.access")

GENERATING_ROUTES = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/infill", "/api/chat", "/api/generate"),
    }
)
TEXT_ROUTES = frozenset(
    {
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/api/embed", "/api/embeddings"),
    }
)
QUIET_ROUTES = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/ready", "/metrics"})


class Tracer(Protocol):
    """Where ended requests become traces."""

    def record(self, ended: EndedRequest) -> str:
        """Export a request that a model has worked on; the id of its trace."""
        ...


class RequestLog:
    """Logs every request once, when all of it has ended. Event-loop thread only.

    Requests that a model works on are logged at info, and so are failures on other routes; the rest of these
    at debug.
    Probes and scrapes are not logged.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._ending: set[asyncio.Task[None]] = set()

    def end(self, ended: EndedRequest) -> None:
        """A request was answered, or its client has gone; what it still generates ends within a step."""
        if ended.accepted is None or ended.accepted.generation.has_ended:
            self._tell(ended)
        else:
            task = asyncio.create_task(self._tell_at_the_end(ended, ended.accepted))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _tell_at_the_end(self, ended: EndedRequest, accepted: Accepted) -> None:
        try:
            await accepted.generation.see_out()
        finally:
            self._tell(_at_the_end(ended))

    def _tell(self, ended: EndedRequest) -> None:
        if ended.route not in GENERATING_ROUTES | TEXT_ROUTES:
            if ended.route not in QUIET_ROUTES:
                level = logging.DEBUG if ended.status < 400 else logging.INFO
                log.log(level, "access", extra=_told(basics(ended)))
            return
        trace_id = ended.caller_trace_id if self._tracer is None else self._tracer.record(ended)
        facts = {**basics(ended), **given("trace_id", trace_id), **generated(ended), **read(ended)}
        log.info("request", extra=_told(facts))


def _told(facts: dict[str, object]) -> dict[str, object]:
    """A record's extras: the facts, and the one row that a terminal shows of them."""
    return {**facts, "rows": lambda: [request_row(facts)]}


def _at_the_end(ended: EndedRequest) -> EndedRequest:
    """`ended` as of now: a client that left did so before its request was over, and no part is longer."""
    seconds = ended.exchange.age_s
    later_ns = round((seconds - ended.seconds) * 1e9)
    return replace(ended, seconds=seconds, ended_ns=ended.ended_ns + later_ns)


def given(name: str, value: object) -> dict[str, object]:
    """The one field, or none when there is no value."""
    return {} if value is None else {name: value}


def basics(ended: EndedRequest) -> dict[str, object]:
    """What any request has."""
    exchange = ended.exchange
    return {
        "request_id": exchange.request_id,
        "route": ended.route,
        "code": ended.status,
        "ms": round(ended.seconds * 1000, 3),
        **given("tenant", exchange.tenant),
        **given("error", ended.fault),
    }


def generated(ended: EndedRequest) -> dict[str, object]:
    """What a request generated, and what that took; nothing for one that was refused."""
    accepted = ended.accepted
    if accepted is None:
        return {}
    choices, body = accepted.generation.choices, accepted.body
    usage = reply_usage(choices)
    return {
        "reply_id": accepted.reply_id,
        **given("model", body.model),
        "stream": bool(body.stream),
        "choices": len(choices),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish_reason": ",".join(sorted(set(ended.finish_reasons))),
        "prepare_ms": round(accepted.prepared_s * 1000, 3),
        **(measured(choices) if ended.finishes else {}),
    }


def read(ended: EndedRequest) -> dict[str, object]:
    """What a request for vectors or scores brought; nothing for one that was refused, or that generates."""
    texts = ended.exchange.texts
    if texts is None:
        return {}
    return {
        "model": texts.model,
        "texts": texts.num_texts,
        "prompt_tokens": texts.num_tokens,
        "prepare_ms": round(texts.prepared_s * 1000, 3),
    }


def measured(choices: Sequence[Choice]) -> dict[str, object]:
    """What the engine tells of choices of which at least one has ended, by the names the reply has for it."""
    metrics = reply_metrics(choices)
    facts = {
        "cached_tokens": num_cached_tokens(one_a_prompt(choices)),
        "queue_ms": metrics["queue_time_ms"],
        "ttft_ms": metrics["time_to_first_token_ms"],
        "generation_ms": metrics["generation_time_ms"],
        "preemptions": metrics["num_preemptions"],
    }
    stats = spec_stats(choices)
    if stats.num_rounds:
        facts |= {
            "draft_tokens": stats.num_proposed,
            "accepted_tokens": stats.num_accepted,
            "acceptance": round(stats.acceptance_rate, 4),
        }
    return {name: value for name, value in facts.items() if value is not None}
