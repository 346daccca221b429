"""anthropic_error: any error in the shape that clients of Anthropic's Messages API read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

_PATH = "/v1/messages"
_OVERLOADED = 529  # Anthropic's status for it
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


class AnyError(Protocol):
    """What is read of an ErrorReply."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def type(self) -> str:
        """OpenAI's type."""
        ...

    @property
    def message(self) -> str:
        """For people."""
        ...


def speaks_anthropic(path: str) -> bool:
    """Whether what is at `path` answers in Anthropic's shapes."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def anthropic_error(error: AnyError, request_id: str) -> tuple[int, dict[str, object]]:
    """The status and the JSON object. That there is no room now has a status of its own."""
    status = _OVERLOADED if error.type == "overloaded_error" else error.status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    told = {"type": kind, "message": error.message}
    return status, {"type": "error", "error": told, "request_id": request_id}
