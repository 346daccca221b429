"""Liveness and readiness. Answered from memory, never through the engine's queue."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import EngineState
from server.http.context import context_of
from server.http.errors import OVERLOADED, ErrorReply, error_reply
from server.http.json_reply import json_response

router = APIRouter(tags=["health"])

_RETRY = {"retry-after": "1"}
_NOT_READY = {
    EngineState.LOADING: ErrorReply(
        503, OVERLOADED, "The model is still loading.", code="loading", headers=_RETRY
    ),
    EngineState.DRAINING: ErrorReply(
        503, OVERLOADED, "The server is shutting down.", code="draining", headers=_RETRY
    ),
}


@router.get("/health")
@router.get("/health/live")
@router.get("/ping")
async def live(request: Request) -> Response:
    """200 while the engine makes progress or has nothing to do; 503 once it is dead or hung."""
    fault = context_of(request).engine.fault
    return json_response({"status": "alive"}) if fault is None else error_reply(fault).response()


@router.get("/health/ready")
@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when requests would be taken: loaded, not draining, alive."""
    refusal = _NOT_READY.get(context_of(request).engine.state)
    if refusal is not None:
        return refusal.response()
    reply = await live(request)
    return json_response({"status": "ready"}) if reply.status_code == 200 else reply


@cache
def server_version() -> str:
    """The installed distribution's version, read once: a scrape would open its files each time."""
    try:
        return version("slipstream")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
