"""OllamaShape: the reply of a turn in Ollama's words, in one object or in lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engine import Finish, FinishReason, OutputDelta
from server.api.blocks import Block, BlockEvent, Closed, Grown
from server.api.call_arguments import arguments_in
from server.api.generation import Choice
from server.api.turn_reply import LARGE_CHARS, NamedEvent
from server.api.usage import reply_metrics
from server.http.errors import error_reply
from server.http.ollama_error import ollama_error

Json = dict[str, Any]

_NS = 1_000_000_000
_DONE_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class OllamaShape:
    """One reply. `is_chat` has its parts in a message; without it they stand in the object itself."""

    model: str
    is_chat: bool
    tells_metrics: bool
    _content: list[str] = field(default_factory=list, init=False)
    _thinking: list[str] = field(default_factory=list, init=False)
    _calls: list[Json] = field(default_factory=list, init=False)
    _whole: Json = field(default_factory=dict, init=False)

    def events(
        self, choice: Choice, delta: OutputDelta, blocks: Sequence[BlockEvent]
    ) -> Iterator[NamedEvent]:
        """See TurnShape."""
        for each in blocks:
            match each:
                case Grown(Block(kind="text"), text):
                    self._content.append(text)
                    yield self._line(text)
                case Grown(Block(kind="reasoning"), text):
                    self._thinking.append(text)
                    yield self._line("", thinking=text)
                case Closed(Block(kind="call") as block):
                    self._calls.append(call_object(block, len(self._calls)))
                    yield self._line("", tool_calls=self._calls[-1:])
        if delta.finish is not None:
            yield self._end(choice, delta.finish)

    def silence(self) -> Iterable[NamedEvent]:
        """See TurnShape: readers take every line for a part of the reply, so it is an empty one."""
        return [self._line("")]

    def failure(self, error: Exception) -> Iterable[NamedEvent]:
        """See TurnShape."""
        return [NamedEvent("", ollama_error(error_reply(error).message))]

    def whole(self) -> Json:
        """See TurnShape."""
        return self._whole

    def loaded(self) -> Json:
        """What answers a request that says nothing: the model is there."""
        return {**self._object("", {}), "done": True, "done_reason": "load"}

    def _line(self, content: str, **parts: object) -> NamedEvent:
        return NamedEvent("", {**self._object(content, parts), "done": False})

    def _object(self, content: str, parts: Json) -> Json:
        head: Json = {"model": self.model, "created_at": now()}
        if self.is_chat:
            return {**head, "message": {"role": "assistant", "content": content, **parts}}
        return {**head, "response": content, **parts}

    def _end(self, choice: Choice, finish: Finish) -> NamedEvent:
        figures = {
            "done": True,
            "done_reason": _DONE_REASONS.get(finish.reason, "abort"),
            **durations(finish),
        }
        if self.tells_metrics:
            figures["metrics"] = reply_metrics([choice])
        parts = {"thinking": "".join(self._thinking), "tool_calls": self._calls}
        content = "".join(self._content)
        said = {name: value for name, value in parts.items() if value}
        self._whole = {**self._object(content, said), **figures}
        # Marked for a reply in one piece, which is as large as all of these together.
        is_large = len(content) + len(parts["thinking"]) > LARGE_CHARS
        return NamedEvent("", {**self._object("", {}), **figures}, is_large)


def durations(finish: Finish) -> Json:
    """Ollama's account of a reply, in nanoseconds. Nothing is loaded for a request."""
    timing = finish.timing
    first_s = timing.queue_s if timing.time_to_first_token_s is None else timing.time_to_first_token_s
    return {
        "total_duration": round((first_s + timing.generation_s) * _NS),
        "load_duration": 0,
        "prompt_eval_count": finish.num_prompt_tokens,
        "prompt_eval_duration": round(max(0.0, first_s - timing.queue_s) * _NS),
        "eval_count": finish.num_output_tokens,
        "eval_duration": round(timing.generation_s * _NS),
    }


def call_object(block: Block, index: int) -> Json:
    """A call with its arguments as an object, also when they were cut."""
    function = {"index": index, "name": block.name, "arguments": arguments_in(block.text)}
    return {"id": block.call_id, "function": function}
