"""/v1/requests/{id}: cancel, re-prioritise or explain one live request; /reset_prefix_cache.

A request is named by its reply's id or by the caller's own x-request-id, and only the key that made it may
touch it. A reply of several choices is one: what is asked for happens to all that still run.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from engine import RequestExplanation
from server.api.body import read_body
from server.api.live_replies import LiveReply
from server.api.openai.protocol import RequestPatch
from server.api.openapi import json_body
from server.api.time_limit import allowed_s
from server.http.context import cache_owner, context_of, exchange_of
from server.http.errors import invalid, request_not_found
from server.http.json_reply import json_response
from server.http.site_guard import refuse_simple

router = APIRouter(tags=["requests"])

RequestName: TypeAlias = Annotated[str, Path(description="The reply's id, or the caller's own x-request-id.")]


# A caller's label may hold slashes.
@router.post("/v1/requests/{request_id:path}/cancel")
async def cancel_request(request: Request, request_id: RequestName) -> Response:
    """End it within a step; its reply ends with `finish_reason` abort."""
    refuse_simple(request)
    reply, engine = find_reply(request, request_id), context_of(request).engine
    if not any([engine.cancel(each) for each in reply.request_ids]):
        raise request_not_found(request_id)
    return json_response({"id": reply.reply_id, "object": "request", "cancelled": True})


@router.patch("/v1/requests/{request_id:path}", openapi_extra=json_body(RequestPatch, {"priority": -5}))
async def change_request(request: Request, request_id: RequestName) -> Response:
    """Give it another priority or deadline, from the next step on; then as GET."""
    patch = await read_body(request, RequestPatch.model_validate)
    if patch.priority is None and patch.deadline_ms is None:
        raise invalid("Nothing to change: give 'priority', 'deadline_ms' or both.")
    reply, context = find_reply(request, request_id), context_of(request)
    deadline_s = None
    if patch.deadline_ms is not None:
        deadline_s = allowed_s(patch.deadline_ms, context.settings.server.request_timeout)
    engine = context.engine
    changed = [
        engine.reprioritize(each, priority=patch.priority, deadline_s=deadline_s)
        for each in reply.request_ids
    ]
    if not any(changed):
        raise request_not_found(request_id)
    return json_response({"id": reply.reply_id, "object": "request", "choices": explain_all(request, reply)})


@router.get("/v1/requests/{request_id:path}")
async def explain_request(request: Request, request_id: RequestName) -> Response:
    """Where each of its choices is, why it waits, and what has happened to it."""
    reply = find_reply(request, request_id)
    choices = explain_all(request, reply)
    if not choices:
        raise request_not_found(request_id)
    return json_response({"id": reply.reply_id, "object": "request", "choices": choices})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached block that no request uses, of the caller's where each key has its own."""
    refuse_simple(request)
    context = context_of(request)
    owner = cache_owner(context, exchange_of(request.scope))
    return json_response({"num_freed_blocks": context.engine.reset_prefix_cache(owner)})


def find_reply(request: Request, name: str) -> LiveReply:
    """The caller's own live reply of this name. Raises ApiError (404)."""
    reply = context_of(request).live.find(name, exchange_of(request.scope).tenant)
    if reply is None:
        raise request_not_found(name)
    return reply


def explain_all(request: Request, reply: LiveReply) -> list[dict[str, object]]:
    """Each choice that still runs."""
    engine = context_of(request).engine
    explained = [(index, engine.explain(each)) for index, each in enumerate(reply.request_ids)]
    return [explanation_object(index, each) for index, each in explained if each is not None]


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
        "kv_blocks": found.num_blocks,
    }
