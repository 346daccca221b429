"""What goes wrong between a client and a server, each with a short name to count it by and a line to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_MESSAGE = 300


class RemoteError(Exception):
    """A request failed. `kind` is short and the same for equal failures; the message is one readable line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Unreachable(RemoteError):
    """No connection, or one that broke off: nothing says what became of the request."""


class Refused(RemoteError):
    """The server answered with an error status.

    `retry_after_s` is when it asks to be tried again, None when it does not say; `is_retryable` is whether
    that can help at all.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        name, message = _read_error(body)
        super().__init__(f"{status} {name}" if name else f"{status}", f"HTTP {status}: {message}")
        self.status = status
        self.retry_after_s = _retry_after_s(headers)
        wish = headers.get("x-should-retry")
        self.is_retryable = wish == "true" or (
            wish != "false" and (status in (408, 409, 429) or status >= 500)
        )


class BrokenReply(RemoteError):
    """The reply began well and ended badly: an error event, a stream cut short, something that is no JSON."""


def error_of_event(error: object) -> BrokenReply:
    """The failure that an error event in a stream tells of."""
    name, message = _fields(error)
    return BrokenReply(f"error event {name}" if name else "error event", message)


def _read_error(body: bytes) -> tuple[str | None, str]:
    """The name and the message in an error reply of any server's making."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None, _one_line(body[:4096].decode(errors="replace")) or "(no message)"
    error: Any = found.get("error", found) if isinstance(found, dict) else found
    return _fields(error)


def _fields(error: object) -> tuple[str | None, str]:
    if not isinstance(error, dict):
        return None, _one_line(str(error))
    # Some servers repeat the status as the code: the type then says more.
    names = (error.get("code"), error.get("type"))
    name = next((each for each in names if isinstance(each, str) and each and not each.isdigit()), None)
    message = error.get("message") or error.get("detail") or json.dumps(error)
    return None if name is None else _one_line(name)[:60], _one_line(str(message))


def _one_line(text: str) -> str:
    """`text` as one line without control characters, cut to what a person reads."""
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "..."


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from `retry-after-ms` or `retry-after`; a date counts as not said."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.replace(".", "", 1).isdigit():
            return float(text) / unit
    return None
