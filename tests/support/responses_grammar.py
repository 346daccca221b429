"""The grammar of the Responses API's events: what may follow what, and that every part adds up.

Held against the types of OpenAI's own client, in strict mode, event by event.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent

from tests.support.named_events import NamedEvent, types_by_name

_EVENTS = types_by_name(ResponseStreamEvent)
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
_INPUTS = {"function_call": "arguments", "custom_tool_call": "input"}
_DONE = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def check_response(response: dict[str, Any]) -> dict[str, Any]:
    """A response as OpenAI's client reads it."""
    Response.model_validate_json(json.dumps(response), strict=True)
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)
    return response


@dataclass
class Walk:
    """Reads the events of one stream in turn."""

    events: list[dict[str, Any]]
    at: int = 0
    items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def next_type(self) -> str:
        return str(self.events[self.at]["type"])

    def take(self, name: str) -> dict[str, Any]:
        event = self.events[self.at]
        assert event["type"] == name, (event["type"], name)
        assert event["sequence_number"] == self.at
        self.at += 1
        return event


def check_responses_stream(sent: list[NamedEvent]) -> dict[str, Any]:
    """The response that a stream ends with; every event before it has been checked."""
    events = [event.payload for event in sent]
    for event in sent:
        assert event.name == event.payload["type"]
        _EVENTS[event.name].model_validate_json(json.dumps(event.payload), strict=True)
    walk = Walk(events)
    begun = walk.take("response.created")["response"]
    assert walk.take("response.in_progress")["response"] == begun
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    while walk.next_type == "response.output_item.added":
        if not _walk_item(walk):
            break
    end = walk.take(walk.next_type)
    assert end["type"] in ENDS
    assert walk.at == len(events), "something follows the end"
    response = check_response(end["response"])
    status = end["type"].removeprefix("response.")
    assert response["status"] == status or (response["status"], status) == ("cancelled", "incomplete")
    assert response["output"] == walk.items
    assert (response["id"], response["created_at"]) == (begun["id"], begun["created_at"])
    return response


def _walk_item(walk: Walk) -> bool:
    """One item from its beginning to its end; False if the stream failed within it."""
    added = walk.take("response.output_item.added")
    item, index = added["item"], added["output_index"]
    kind, place = item["type"], {"item_id": item["id"], "output_index": index}
    assert index == len(walk.items)
    part = {**place, "content_index": 0} if kind in _TEXTS else place
    if kind in _TEXTS:
        opened = walk.take("response.content_part.added")
        assert part.items() <= opened.items()
        assert (opened["part"]["type"], opened["part"]["text"]) == (_TEXTS[kind], "")
    told, logprobs = "", []
    while walk.next_type == f"{_DONE[kind]}.delta":
        delta = walk.take(f"{_DONE[kind]}.delta")
        assert part.items() <= delta.items() and delta["delta"]
        told += delta["delta"]
        logprobs += delta.get("logprobs", [])
    if walk.next_type == "response.failed":
        return False
    done = walk.take(f"{_DONE[kind]}.done")
    assert part.items() <= done.items()
    key = "text" if kind in _TEXTS else _INPUTS[kind]
    assert done[key] == told
    if kind in _TEXTS:
        whole = walk.take("response.content_part.done")["part"]
        assert whole["text"] == told and whole.get("logprobs", []) == logprobs
    ended = walk.take("response.output_item.done")
    assert ended["output_index"] == index
    _check_item(ended["item"], item, told)
    walk.items.append(ended["item"])
    return True


def _check_item(ended: dict[str, Any], begun: dict[str, Any], told: str) -> None:
    kind = begun["type"]
    growing = {"status", "content", "arguments", "input", "encrypted_content"}
    for name in ended.keys() - growing:
        assert ended[name] == begun[name]
    assert ended.get("status", "completed") in ("completed", "incomplete")
    if kind in _TEXTS:
        assert [(part["type"], part["text"]) for part in ended["content"]] == [(_TEXTS[kind], told)]
    else:
        assert ended[_INPUTS[kind]] == told
