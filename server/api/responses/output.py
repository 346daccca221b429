"""What a response shows: its items, made of the blocks of a reply, and the response around them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Finish, FinishReason
from server.api.blocks import Block
from server.api.generation import Choice
from server.api.long_list import LongList
from server.api.responses.conversation import encoded
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.tools import ToolSet, ToolSource, custom_input
from server.api.sampling import effective
from server.api.usage import num_cached_tokens, num_reasoning_tokens, reply_metrics

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_TEXT_KINDS = {"text": "message", "reasoning": "reasoning"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a response ended, or that it has not: OpenAI's status, and why it is not complete."""

    status: str = "in_progress"
    reason: str | None = None
    error: Mapping[str, str] | None = None

    @classmethod
    def of(cls, finish: Finish) -> Outcome:
        """A reply that was cancelled has a status, and no reason among those that OpenAI knows."""
        match finish.reason:
            case FinishReason.STOP:
                return cls("completed")
            case FinishReason.LENGTH:
                return cls("incomplete", "max_output_tokens")
        return cls("cancelled")


class ItemSpelling:
    """Spells the blocks of one reply as items; the id of each stays the same."""

    def __init__(self, response_id: str, tools: ToolSet, *, encodes_thoughts: bool = False) -> None:
        """Ids of items are made from the response's. Thoughts may come in a form to give back, too."""
        self._base = response_id.partition("_")[2]
        self._tools = tools
        self._encodes_thoughts = encodes_thoughts

    def source(self, block: Block) -> ToolSource:
        """What a block's call calls."""
        return self._tools.source_of(block.name)

    def kind(self, block: Block) -> str:
        """The item's type."""
        if block.kind in _TEXT_KINDS:
            return _TEXT_KINDS[block.kind]
        return "function_call" if self.source(block).kind == "function" else "custom_tool_call"

    def item_id(self, block: Block) -> str:
        """As long as the response lives, nothing else has it."""
        return f"{_PREFIXES[self.kind(block)]}_{self._base}{block.index:02x}"

    def begun(self, block: Block) -> Item:
        """The item before it has any content."""
        item: Item = {"id": self.item_id(block), "type": self.kind(block)}
        if block.kind == "text":
            return {**item, "status": "in_progress", "role": "assistant", "content": []}
        if block.kind == "reasoning":
            return {**item, "status": "in_progress", "summary": [], "content": []}
        source = self.source(block)
        item |= {"call_id": block.call_id, "name": source.name}
        if source.namespace is not None:
            item["namespace"] = source.namespace
        if source.kind == "custom":
            return {**item, "input": ""}
        return {**item, "status": "in_progress", "arguments": ""}

    def whole(self, block: Block, logprobs: LongList | None = None) -> Item:
        """The item when it has ended."""
        item = self.begun(block)
        if "status" in item:
            item["status"] = "incomplete" if block.is_cut else "completed"
        if block.kind == "text":
            item["content"] = [text_part(block.text, logprobs)]
        elif block.kind == "reasoning":
            item["content"] = [thought_part(block.text)]
            if self._encodes_thoughts:
                item["encrypted_content"] = encoded(block.text)
        elif "input" in item:
            item["input"] = custom_input(block.text)
        else:
            item["arguments"] = block.text
        return item


def text_part(text: str, logprobs: LongList | None = None) -> Item:
    """The part of a message that holds its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def thought_part(text: str) -> Item:
    """The part of a reasoning item that holds its text."""
    return {"type": "reasoning_text", "text": text}


@dataclass(frozen=True, slots=True)
class ServedBy:
    """What a response says of its server: its model's first name, and how it samples unasked."""

    model: str
    advised: Mapping[str, float]
    tells_metrics: bool


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a response says whatever its output: what was asked for, and when."""

    response_id: str
    created_at: int
    fields: Mapping[str, object]
    tells_metrics: bool

    @classmethod
    def of(cls, body: ResponsesRequest, tools: ToolSet, response_id: str, server: ServedBy) -> Envelope:
        """Taken from the body, which may be forgotten then; where it is silent, what holds by the server."""
        text = {"format": {"type": "text"}} if body.text is None else _dumped(body.text)
        choice = body.tool_choice if isinstance(body.tool_choice, str) else _dumped(body.tool_choice)
        tier = body.service_tier
        fields = {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": body.model or server.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_diagnostics": None,
            "prompt_cache_key": _label(body.prompt_cache_key),
            "prompt_cache_retention": None,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None if body.reasoning is None else body.reasoning.summary,
            },
            "safety_identifier": _label(body.safety_identifier),
            "service_tier": "default" if tier in (None, "auto") else tier,
            "store": body.is_stored,
            "temperature": effective("temperature", body.temperature, server.advised),
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice or "auto",
            "tools": tools.echoed,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": effective("top_p", body.top_p, server.advised),
            "truncation": "disabled",
            "user": _label(body.user),
        }
        return cls(response_id, int(time.time()), fields, server.tells_metrics)

    def response(
        self, outcome: Outcome, output: Sequence[Item], choice: Choice | None = None
    ) -> dict[str, Any]:
        """The response; `choice` is given with its end, for what it used."""
        response: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if outcome.status == "completed" else None,
            "status": outcome.status,
            "error": outcome.error,
            "incomplete_details": None if outcome.reason is None else {"reason": outcome.reason},
            **self.fields,
            "output": output,
            "usage": None if choice is None else usage_of(choice),
        }
        if choice is not None and self.tells_metrics:
            response["metrics"] = reply_metrics([choice])
        return response


def usage_of(choice: Choice) -> dict[str, object]:
    """OpenAI's `usage` of a response. Nothing is ever written to the cache for its own sake."""
    num_input, num_output = len(choice.prompt.token_ids), choice.num_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached_tokens([choice]), "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens([choice]) or 0},
        "total_tokens": num_input + num_output,
    }


def _dumped(value: Any) -> dict[str, Any]:
    return {} if value is None else dict(value.model_dump(exclude_none=True, by_alias=True))


def _label(value: object) -> str | None:
    return value if isinstance(value, str) else None
