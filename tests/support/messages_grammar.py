"""The grammar of the Messages API's events: what may follow what, and that every part adds up.

Held against the types of Anthropic's own client, in strict mode, event by event.
"""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic_core import from_json

from tests.support.named_events import NamedEvent, types_by_name

_EVENTS = types_by_name(RawMessageStreamEvent)
ERROR_TYPES = {
    *("invalid_request_error", "authentication_error", "permission_error", "not_found_error"),
    *("request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error"),
}


def check_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as Anthropic's client reads it."""
    Message.model_validate_json(json.dumps(message), strict=True)
    return message


def check_error(body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's error object."""
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] in ERROR_TYPES
    assert body["request_id"]
    error: dict[str, Any] = body["error"]
    return error


def check_messages_stream(sent: list[NamedEvent]) -> dict[str, Any]:
    """The message that the events of a stream come to; each has been checked."""
    events = [event for event in sent if event.name != "ping"]
    assert all(event.payload == {"type": "ping"} for event in sent if event.name == "ping")
    for event in events:
        assert event.name == event.payload["type"]
        _EVENTS[event.name].model_validate_json(json.dumps(event.payload), strict=True)
    payloads = [event.payload for event in events]
    assert sent[0].name == "message_start"
    message = check_message(payloads[0]["message"])
    assert message["content"] == [] and message["stop_reason"] is None
    assert [event.name for event in events[-2:]] == ["message_delta", "message_stop"]
    content = _check_blocks(payloads[1:-2])
    end = payloads[-2]
    assert (
        end["usage"]["input_tokens"] + end["usage"]["cache_read_input_tokens"]
        == (message["usage"]["input_tokens"])
    )
    return check_message({**message, **end["delta"], "content": content, "usage": end["usage"]})


def _check_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks that follow each other, each begun, grown and ended."""
    blocks: list[dict[str, Any]] = []
    is_open, partial = False, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open, partial = True, ""
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = from_json(partial or "{}", allow_partial="trailing-strings")
            continue
        delta = event["delta"]
        match delta["type"]:
            case "text_delta":
                assert delta["text"]
                blocks[-1]["text"] += delta["text"]
            case "thinking_delta":
                assert delta["thinking"]
                blocks[-1]["thinking"] += delta["thinking"]
            case "signature_delta":
                assert not blocks[-1]["signature"] and delta["signature"]
                blocks[-1]["signature"] = delta["signature"]
            case "input_json_delta":
                assert blocks[-1]["type"] == "tool_use"
                partial += delta["partial_json"]
    assert not is_open
    return blocks
