"""/v1/requests: list the live ones, cancel, re-prioritise or explain one; /reset_prefix_cache.

A request is named by its reply's id or by the caller's own x-request-id, and only the key that made it may
touch it. A reply of several choices is one: what is asked for happens to all that still run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from engine import DraftingChange, Engine, RequestDrafting, RequestExplanation
from server.api.body import read_body
from server.api.live_replies import LiveReply
from server.api.openai.protocol import RequestPatch
from server.api.openapi import json_body
from server.api.speculation import speculation_change
from server.api.time_limit import allowed_s
from server.http.context import ServerContext, cache_owner, context_of, exchange_of
from server.http.errors import invalid, request_not_found, shown
from server.http.json_reply import json_response
from server.http.site_guard import refuse_simple

router = APIRouter(tags=["requests"])

LIST_PATH = "/v1/requests"
# Each explanation looks at all requests that wait.
DEFAULT_LISTED, MOST_LISTED = 20, 100
_LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "Most of them to list.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": DEFAULT_LISTED},
}


class _RequestPath(PathConvertor):
    """A caller's label, which may hold slashes. Behind the last one `cancel` is no part of it."""

    regex = "(?!.*/cancel$).*"


register_url_convertor("live", _RequestPath())

RequestName: TypeAlias = Annotated[str, Path(description="The reply's id, or the caller's own x-request-id.")]


@router.get(LIST_PATH, openapi_extra={"parameters": [_LIMIT]})
async def list_requests(request: Request) -> Response:
    """The caller's live requests, oldest first."""
    limit = read_limit(request)
    found = list(islice(context_of(request).live.of(exchange_of(request.scope).tenant), limit + 1))
    data = []
    for reply in found[:limit]:
        data.append(await request_object(request, reply))
    data = [each for each in data if each["choices"]]
    return json_response({"object": "list", "data": data, "has_more": len(found) > limit})


@router.post("/v1/requests/{request_id:path}/cancel")
async def cancel_request(request: Request, request_id: RequestName) -> Response:
    """End it within a step; its reply ends with `finish_reason` abort."""
    refuse_simple(request)
    reply, engine = find_reply(request, request_id), context_of(request).engine
    if not any([engine.cancel(each) for each in reply.request_ids]):
        raise request_not_found(request_id)
    return json_response({"id": reply.reply_id, "object": "request", "cancelled": True})


@router.patch("/v1/requests/{request_id:live}", openapi_extra=json_body(RequestPatch, {"priority": -5}))
async def change_request(request: Request, request_id: RequestName) -> Response:
    """Give it another priority or deadline, or draft for it otherwise, from the next step on; then as GET."""
    patch = await read_body(request, lambda data, _: RequestPatch.model_validate(data))
    if not _has_values(patch):
        raise invalid("Nothing to change: give 'priority', 'deadline_ms' or 'speculation'.")
    reply, context = find_reply(request, request_id), context_of(request)
    change, engine = _read_change(context, patch), context.engine
    if not any([_change(engine, each, change) for each in reply.request_ids]):
        raise request_not_found(request_id)
    return json_response(await request_object(request, reply))


def _has_values(patch: BaseModel) -> bool:
    """True if anything in it, or in a part of it, is given and not null."""
    values = (getattr(patch, name) for name in type(patch).model_fields)
    return any(_has_values(each) if isinstance(each, BaseModel) else each is not None for each in values)


@dataclass(frozen=True, slots=True)
class _Change:
    """What is to change, checked; None leaves it as it is."""

    priority: int | None
    deadline_s: float | None
    drafting: DraftingChange | None


def _read_change(context: ServerContext, patch: RequestPatch) -> _Change:
    """All of it is checked before anything changes. Raises ApiError."""
    deadline_s = drafting = None
    if patch.deadline_ms is not None:
        deadline_s = allowed_s(patch.deadline_ms, context.settings.server.request_timeout)
    if patch.speculation is not None:
        drafting = speculation_change(patch.speculation, context.engine.info)
    return _Change(patch.priority, deadline_s, drafting)


def _change(engine: Engine, request_id: str, change: _Change) -> bool:
    """False when there is no such request any more."""
    if change.drafting is not None:
        engine.controls.retune(request_id, change.drafting)
    return engine.controls.reprioritize(request_id, priority=change.priority, deadline_s=change.deadline_s)


@router.get("/v1/requests/{request_id:live}")
async def explain_request(request: Request, request_id: RequestName) -> Response:
    """Where each of its choices is, why it waits, and what has happened to it."""
    found = await request_object(request, find_reply(request, request_id))
    if not found["choices"]:
        raise request_not_found(request_id)
    return json_response(found)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached block that no request uses, of the caller's where each key has its own."""
    refuse_simple(request)
    context = context_of(request)
    owner = cache_owner(context, exchange_of(request.scope))
    return json_response({"num_freed_blocks": context.engine.controls.reset_prefix_cache(owner)})


def read_limit(request: Request) -> int:
    """How many requests are to be listed. Raises ApiError."""
    text = request.query_params.get("limit", str(DEFAULT_LISTED))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
    if not 1 <= limit <= MOST_LISTED:
        raise invalid(f"'limit' is {shown(text)}; it goes from 1 to {MOST_LISTED}.", "limit")
    return limit


def find_reply(request: Request, name: str) -> LiveReply:
    """The caller's own live reply of this name. Raises ApiError (404)."""
    reply = context_of(request).live.find(name, exchange_of(request.scope).tenant)
    if reply is None:
        raise request_not_found(name)
    return reply


async def request_object(request: Request, reply: LiveReply) -> dict[str, object]:
    """A live request, as JSON, with each of its choices that still runs."""
    engine = context_of(request).engine
    choices = []
    for index, each in enumerate(reply.request_ids):
        explained = engine.controls.explain(each)
        if explained is not None:
            choices.append(explanation_object(index, explained))
        await asyncio.sleep(0)  # others have their turn between two
    return {
        "id": reply.reply_id,
        "object": "request",
        "label": reply.label,
        "age_ms": round((engine.now() - reply.arrival_time) * 1000, 3),
        "choices": choices,
    }


def explanation_object(index: int, found: RequestExplanation) -> dict[str, object]:
    """One choice, as JSON; `preemptions` are dated in seconds ago, `deadline_ms` counts from arrival."""
    return {
        "index": index,
        "status": found.status,
        "waits_because": found.waits_because,
        "position": found.position,
        "priority": found.priority,
        "deadline_ms": None if found.deadline_s is None else round(found.deadline_s * 1000, 3),
        "preemptions": [{"seconds_ago": round(ago, 3), "mode": mode} for ago, mode in found.preemptions],
        "known_tokens": found.num_known_tokens,
        "generated_tokens": found.num_output_tokens,
        "computed_tokens": found.num_computed_tokens,
        "cached_tokens": found.num_cached_tokens,
        "draft_tokens": found.num_draft_tokens,
        "accepted_draft_tokens": found.num_accepted_tokens,
        "draft_acceptance_rate": _rate(found.num_accepted_tokens, found.num_draft_tokens),
        "kv_blocks": found.num_blocks,
        "speculation": _drafting(found.drafting),
    }


def _drafting(found: RequestDrafting) -> dict[str, object]:
    """Whether the choice is drafted for, by whom, when, how long drafts may be and are, and why not."""
    return {
        "on": found.why_off is None,
        "drafter": found.drafter,
        "methods": list(found.methods),
        "schedule": found.schedule or None,
        "num_tokens": found.num_tokens,
        "length": found.length,
        "length_policy": found.length_policy,
        "why_off": found.why_off,
    }


def _rate(num_accepted: int, num_drafted: int) -> float | None:
    """None where nothing was drafted: a zero would say that drafts were wrong."""
    return round(num_accepted / num_drafted, 4) if num_drafted else None
