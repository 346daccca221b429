"""Errors as clients see them: one table from exceptions to status, type and code.

No text made here holds a path, a repr or more than `MAX_ECHO` characters of what the client sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    frames_of,
)
from server.http.anthropic_error import anthropic_error, speaks_anthropic
from server.http.json_reply import json_response
from server.http.ollama_error import ollama_error, speaks_ollama

log = logging.getLogger("slipstream.server")

MAX_ECHO = 100
_MAX_MESSAGE = 1000

# Of a scope: the name of the error that its request was answered with, and the request's id.
ERROR_KEY, REQUEST_ID_KEY = "slipstream.error", "slipstream.request_id"

INVALID = "invalid_request_error"
NOT_FOUND = "not_found_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
OVERLOADED = "overloaded_error"
SERVER = "server_error"
TIMEOUT = "timeout_error"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as OpenAI's clients read it, with the status and headers that go with it.

    On the paths of another API it is sent in the shape of that one.
    """

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON object of a reply and of an SSE error event."""
        error = {
            "message": self.message[:_MAX_MESSAGE],
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def name(self) -> str:
        """One word for it, as logs and traces have it: the code, or the type if it has none."""
        return self.code or self.type

    def response(self, scope: Scope | None = None) -> Response:
        """The whole HTTP reply to the request of `scope`; without one, OpenAI's."""
        status, body = self.status, self.body()
        if scope is not None and speaks_anthropic(scope["path"]):
            status, body = anthropic_error(self, scope.get(REQUEST_ID_KEY, ""))
        elif scope is not None and speaks_ollama(scope["path"]):
            body = ollama_error(self.message[:_MAX_MESSAGE])
        return json_response(body, status, self.headers)

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request of `scope` with it, and note so there."""
        scope[ERROR_KEY] = self.name
        await self.response(scope)(scope, receive, send)


class ApiError(Exception):
    """Raised by the server's own checks; carries the reply."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


def invalid(message: str, param: str | None = None) -> ApiError:
    """A 400 that names the field to change."""
    return ApiError(ErrorReply(400, INVALID, message, param))


def model_not_found(name: str) -> ApiError:
    """A 404 for a model that is not served here."""
    message = f"The model '{shown(name)}' does not exist: GET /v1/models lists what is served."
    return ApiError(ErrorReply(404, NOT_FOUND, message, "model", "model_not_found"))


def request_not_found(name: str) -> ApiError:
    """A 404 for a request that does not run, or is not the caller's: the two look the same."""
    message = f"The request '{shown(name)}' does not exist or has ended."
    return ApiError(ErrorReply(404, NOT_FOUND, message, code="request_not_found"))


def shown(text: str) -> str:
    """A client's own text, short enough to be sent back."""
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


def error_reply(error: Exception) -> ErrorReply:
    """The reply for any exception; an unforeseen one is logged and becomes a bare 500."""
    match error:
        case ApiError():
            return error.reply
        case ContextLengthExceeded():
            return ErrorReply(400, INVALID, str(error), error.param, "context_length_exceeded")
        case InvalidRequest():
            return ErrorReply(400, INVALID, str(error), error.param)
        case Overloaded():
            retry = {"retry-after": str(error.retry_after_s)}
            return ErrorReply(503, OVERLOADED, str(error), code=error.code, headers=retry)
        case DeadlineExceeded():
            headers = {"x-should-retry": "false"}
            if error.completion_s is not None:
                headers["retry-after"] = str(error.retry_after_s)
                headers["x-estimated-completion-ms"] = str(round(error.completion_s * 1000))
            return ErrorReply(504, TIMEOUT, str(error), code="deadline_exceeded", headers=headers)
        case EngineDead():
            return ErrorReply(503, SERVER, str(error), code=error.code)
        case RequestFailed():
            message = f"The request could not be finished: {error}."
            return ErrorReply(500, SERVER, message, code=f"{error.stage}_failed")
        case HTTPException():
            return _http_reply(error)
    log.error("unexpected %s in a request", type(error).__name__, extra=frames_of(error))
    return ErrorReply(500, SERVER, "The server had an error while processing the request.")


def _http_reply(error: HTTPException) -> ErrorReply:
    """What Starlette refuses by itself; `server.http.unrouted` answers for wrong paths and methods."""
    kind = INVALID if error.status_code < 500 else SERVER
    message = "The request could not be served."
    return ErrorReply(error.status_code, kind, message, headers=dict(error.headers or {}))


async def answer_error(request: Request, error: Exception) -> Response:
    """The exception handler of the application, for every type it knows."""
    reply = error_reply(error)
    request.scope[ERROR_KEY] = reply.name
    return reply.response(request.scope)
