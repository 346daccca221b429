"""MessageShape: the reply of a turn as a message, or as Anthropic's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from engine import Finish, FinishReason, OutputDelta
from server.api.blocks import Block, BlockEvent, Closed, Grown, Opened
from server.api.call_arguments import arguments_in
from server.api.generation import Choice
from server.api.turn_reply import LARGE_CHARS, NamedEvent
from server.api.usage import num_cached_tokens, num_reasoning_tokens, reply_metrics
from server.http.anthropic_error import anthropic_error
from server.http.errors import error_reply

Json = dict[str, Any]

_PING = NamedEvent("ping", {"type": "ping"})


@dataclass(slots=True)
class MessageShape:
    """One message. `num_prompt_tokens` and `max_tokens` are those of its request.

    `hides_thoughts`: the client wants to know that there were some, and not what.
    """

    message_id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    tells_metrics: bool
    request_id: str
    hides_thoughts: bool = False
    _content: list[Json] = field(default_factory=list, init=False)
    _whole: Json = field(default_factory=dict, init=False)
    _is_begun: bool = field(default=False, init=False)
    _has_pinged: bool = field(default=False, init=False)
    _num_chars: int = field(default=0, init=False)

    def events(
        self, choice: Choice, delta: OutputDelta, blocks: Sequence[BlockEvent]
    ) -> Iterator[NamedEvent]:
        """See TurnShape."""
        yield from self._opening()
        for each in blocks:
            yield from self._of_block(each)
        if delta.finish is not None:
            yield from self._end(choice, delta.finish)

    def silence(self) -> Iterator[NamedEvent]:
        """See TurnShape: Anthropic has an event for it."""
        yield from self._opening()
        yield _PING

    def failure(self, error: Exception) -> Iterable[NamedEvent]:
        """See TurnShape."""
        _, body = anthropic_error(error_reply(error), self.request_id)
        return [NamedEvent("error", body)]

    def whole(self) -> Json:
        """See TurnShape."""
        return self._whole

    def _opening(self) -> Iterator[NamedEvent]:
        if not self._is_begun:
            self._is_begun = True
            usage = self._usage()
            yield NamedEvent(
                "message_start", {"type": "message_start", "message": self._message([], None, None, usage)}
            )

    def _of_block(self, event: BlockEvent) -> Iterator[NamedEvent]:
        match event:
            case Opened(block):
                yield _event("content_block_start", block, content_block=self._begun(block))
                if not self._has_pinged:  # as Anthropic does, for whatever waits for the first bytes
                    self._has_pinged = True
                    yield _PING
            case Grown(block, text):
                self._num_chars += len(text)
                if not (block.kind == "reasoning" and self.hides_thoughts):
                    yield _event("content_block_delta", block, delta=_delta(block, text))
            case Closed(block):
                ended = self._ended(block)
                self._content.append(ended)
                if block.kind == "reasoning":
                    signature = {"type": "signature_delta", "signature": ended["signature"]}
                    yield _event("content_block_delta", block, delta=signature)
                yield _event("content_block_stop", block)

    def _begun(self, block: Block) -> Json:
        if block.kind == "text":
            return {"type": "text", "text": ""}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": tool_use_id(block), "name": block.name, "input": {}}

    def _ended(self, block: Block) -> Json:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            shown = "" if self.hides_thoughts else block.text
            return {"type": "thinking", "thinking": shown, "signature": signature_of(block.text)}
        return {**self._begun(block), "input": arguments_in(block.text)}

    def _end(self, choice: Choice, finish: Finish) -> Iterator[NamedEvent]:
        reason, stop = self._stop(finish)
        usage = self._usage(choice)
        self._whole = self._message(self._content, reason, stop, usage)
        told: Json = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": usage,
        }
        if self.tells_metrics:
            self._whole["metrics"] = told["metrics"] = reply_metrics([choice])
        yield NamedEvent("message_delta", told)
        # Marked for a reply in one piece, which is as large as all of these together.
        yield NamedEvent("message_stop", {"type": "message_stop"}, self._num_chars > LARGE_CHARS)

    def _stop(self, finish: Finish) -> tuple[str | None, str | None]:
        """Why it stopped; a message that was cancelled has no reason among those that Anthropic knows."""
        match finish.reason:
            case FinishReason.STOP if isinstance(finish.stop_reason, str):
                return "stop_sequence", finish.stop_reason
            case FinishReason.STOP:
                has_calls = any(each["type"] == "tool_use" for each in self._content)
                return ("tool_use" if has_calls else "end_turn"), None
            case FinishReason.LENGTH if finish.num_output_tokens < self.max_tokens:
                return "model_context_window_exceeded", None
            case FinishReason.LENGTH:
                return "max_tokens", None
        return None, None

    def _message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self, ended: Choice | None = None) -> Json:
        """Tokens that were found in the cache are not among `input_tokens`; they are known at the end."""
        num_cached = 0 if ended is None else num_cached_tokens([ended])
        usage: Json = {
            "input_tokens": self.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": 0 if ended is None else ended.num_tokens,
        }
        num_thought = None if ended is None else num_reasoning_tokens([ended])
        if num_thought is not None:
            usage["output_tokens_details"] = {"thinking_tokens": num_thought}
        return usage


def tool_use_id(block: Block) -> str:
    """The call's id as Anthropic spells them."""
    return f"toolu_{block.call_id.removeprefix('call_')}"


def signature_of(thoughts: str) -> str:
    """What stands for Anthropic's proof that thoughts are its model's: clients drop thoughts without any."""
    return blake2b(thoughts.encode("utf-8", "replace"), digest_size=24).hexdigest()


def _event(name: str, block: Block, **fields: object) -> NamedEvent:
    return NamedEvent(name, {"type": name, "index": block.index, **fields})


def _delta(block: Block, text: str) -> Json:
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
