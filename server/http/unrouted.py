"""Requests that no route serves: a wrong path, or a wrong method for it. Says what would be right."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from server.http.context import context_of
from server.http.errors import ERROR_KEY, INVALID, NOT_FOUND, ErrorReply, error_reply, shown
from server.http.ollama_error import speaks_ollama

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


async def answer_unrouted(request: Request, error: Exception) -> Response:
    """The exception handler for what the router raises."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status in (404, 405):
        allowed = allowed_methods(request, request.scope["path"])
        reply = _wrong_method(request, allowed) if allowed else _wrong_path(request)
    else:
        reply = error_reply(error)
    request.scope[ERROR_KEY] = reply.name
    return reply.response(request.scope)


def allowed_methods(request: Request, path: str) -> list[str]:
    """The methods that `path` takes in this application; none if there is no such path."""
    found = [method for method in _METHODS if is_served(request, path, method)]
    if "GET" in found and "HEAD" not in found:  # see HeadMiddleware
        found.insert(found.index("GET") + 1, "HEAD")
    return found


def is_served(request: Request, path: str, method: str) -> bool:
    """True where a route takes this method on this path."""
    scope = {**request.scope, "path": path, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


def _wrong_method(request: Request, allowed: list[str]) -> ErrorReply:
    methods = ", ".join(allowed)
    path = shown(request.scope["path"])
    message = f"'{path}' does not take {shown(request.method)}; it takes {methods}."
    return ErrorReply(405, INVALID, message, code="method_not_allowed", headers={"allow": methods})


def _wrong_path(request: Request) -> ErrorReply:
    path = request.scope["path"]
    meant = next((each for each in _meant(path) if allowed_methods(request, each)), None)
    hint = "GET /openapi.json lists all" if meant is None else f"use '{shown(meant)}'"
    if speaks_ollama(path) and not context_of(request).settings.server.ollama_api:
        hint = "--ollama-api serves Ollama's"
    message = f"There is no path '{shown(path)}' here: {hint}."
    return ErrorReply(404, NOT_FOUND, message, code="not_found")


def _meant(path: str) -> Iterator[str]:
    """What `path` may have been meant for: a base URL with no /v1 or with two, or slashes too many."""
    parts = [part for part in path.split("/") if part]
    plain = "/" + "/".join(parts)
    if parts:
        yield plain
        yield f"/v1{plain}"
    if parts[:2] == ["v1", "v1"]:
        yield "/" + "/".join(parts[1:])
