"""What one event of a streamed completion says, from either endpoint of any server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.commands.remote.failures import BrokenReply, error_of_event

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event. `text` is the answer's, `aside` what else was generated: reasoning, a tool call's arguments.

    `usage` and `metrics` are the server's own account, None where the event carries none.
    """

    text: str
    aside: str
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    metrics: Mapping[str, Any] | None


def read_chunk(payload: bytes) -> Chunk:
    """The event in `payload`. Raises BrokenReply for an error event and for what is no such event."""
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        raise BrokenReply("event without JSON", "the stream holds an event that is no JSON") from None
    if not isinstance(event, dict):
        raise BrokenReply("event without JSON", "the stream holds an event that is no JSON object")
    if event.get("error"):
        raise error_of_event(event["error"])
    try:
        return _read_choices(event)
    except (AttributeError, TypeError):
        raise BrokenReply("unknown event", "the stream holds an event that is no completion chunk") from None


def _read_choices(event: Mapping[str, Any]) -> Chunk:
    text, aside, finish_reason = "", "", None
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or ""
        aside += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            aside += (call.get("function") or {}).get("arguments") or ""
        finish_reason = choice.get("finish_reason") or finish_reason
    return Chunk(text, aside, finish_reason, _object(event.get("usage")), _object(event.get("metrics")))


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of the tokens that were drafted ahead for one reply, or for many together."""

    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(
            self.num_steps + other.num_steps,
            self.num_proposed + other.num_proposed,
            self.num_accepted + other.num_accepted,
        )

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were right; 0 when there were none."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """How many tokens a verified step gave: those accepted and the one after them."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0


def read_drafts(metrics: Mapping[str, Any] | None) -> Drafts | None:
    """The drafts that a reply's `metrics.speculative_decoding` counts; None when the server says nothing."""
    found = _object((metrics or {}).get("speculative_decoding"))
    if found is None:
        return None
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    return Drafts(*(whole_number(found.get(name)) or 0 for name in names))


def whole_number(value: object) -> int | None:
    """`value` if it is a count, else None: other people's servers send what they like."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _object(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) else None
