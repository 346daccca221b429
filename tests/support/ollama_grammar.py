"""The grammar of Ollama's replies: what a line holds, and that all of them add up to the whole."""

from __future__ import annotations

from datetime import datetime
from typing import Any

_HEAD = {"model", "created_at", "done"}
_FIGURES = {
    *("done_reason", "total_duration", "load_duration", "metrics"),
    *("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
}
_PARTS = {"content", "thinking", "tool_calls"}


def check_lines(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply that the lines of a stream come to; each has been checked."""
    *before, end = lines
    assert all(line["done"] is False for line in before) and end["done"] is True
    for line in before:
        _check(line, set())
        said = _said(line)
        assert sum(bool(part) for part in said.values()) <= 1, line
    assert not any(_said(end).values())
    check_reply(end)
    parts: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
    for line in before:
        for name, part in _said(line).items():
            parts[name] += part
    return parts


def check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """What a whole reply says, checked."""
    _check(reply, _FIGURES)
    for name in _FIGURES - {"done_reason", "metrics"}:
        assert type(reply[name]) is int and reply[name] >= 0, name
    assert reply["done"] is True and reply["done_reason"] in ("stop", "length", "abort")
    return _said(reply)


def _check(line: dict[str, Any], more: set[str]) -> None:
    message = line.get("message")
    own = {"message"} if message is not None else {"response", "thinking"}
    assert line.keys() - own == _HEAD | more, line
    assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
    if message is not None:
        assert message["role"] == "assistant" and message.keys() - {"role"} <= _PARTS
    for call in _said(line)["tool_calls"]:
        assert call.keys() == {"id", "function"}
        assert call["function"].keys() == {"index", "name", "arguments"}
        assert isinstance(call["function"]["arguments"], dict)


def _said(line: dict[str, Any]) -> dict[str, Any]:
    message = line.get("message") or {"content": line["response"], "thinking": line.get("thinking", "")}
    return {
        "content": message["content"],
        "thinking": message.get("thinking", ""),
        "tool_calls": message.get("tool_calls", []),
    }
