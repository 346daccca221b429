"""ResponsesShape: the reply of a turn as a response, or as OpenAI's typed events, numbered from 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine import OutputDelta, TokenLogprobs
from server.api.blocks import Block, BlockEvent, Closed, Grown, Opened
from server.api.generation import Choice
from server.api.long_list import LongList
from server.api.openai.logprobs import TokenSpelling, token_records
from server.api.openai.reply import MANY_VALUES, num_scores
from server.api.responses.output import Envelope, Item, ItemSpelling, Outcome, text_part, thought_part
from server.api.turn_reply import LARGE_CHARS, NamedEvent
from server.http.errors import error_reply

_LARGE_REQUEST = 65_536  # bytes; what the response repeats of it may be as large


# Takes a response at its end, its output, and how many log-probabilities are in that.
Keep: TypeAlias = Callable[[dict[str, Any], Sequence[Item], int], None]


@dataclass(slots=True)
class ResponsesShape:
    """One response. `keep` is called with it at its end.

    `spelling` is None unless the text comes with log-probabilities. `request_bytes` is how much was asked.
    """

    envelope: Envelope
    items: ItemSpelling
    keep: Keep
    spelling: TokenSpelling | None = None
    request_bytes: int = 0
    output: list[Item] = field(default_factory=list, init=False)  # of closed blocks
    _ended: dict[str, Any] = field(default_factory=dict, init=False)
    _num_events: int = field(default=0, init=False)
    _num_chars: int = field(default=0, init=False)
    _untold: list[TokenLogprobs] = field(default_factory=list, init=False)  # come with the next text
    _told: list[TokenLogprobs] = field(default_factory=list, init=False)  # of the open text
    _num_scores: int = field(default=0, init=False)  # of all texts

    def events(
        self, choice: Choice, delta: OutputDelta, blocks: Sequence[BlockEvent]
    ) -> Iterator[NamedEvent]:
        """See TurnShape."""
        yield from self._opening()
        self._untold += delta.logprobs
        bytes_left = sum(len(each.text.encode()) for each in blocks if isinstance(each, Grown))
        for each in blocks:
            if isinstance(each, Grown):
                bytes_left -= len(each.text.encode())
            yield from self._of_block(each, bytes_left)
        if delta.finish is not None:
            if not self.output:
                yield from self._empty_message()
            yield from self._end(Outcome.of(delta.finish), choice)

    def silence(self) -> Iterable[NamedEvent]:
        """See TurnShape: that there is a response may be the first thing to tell."""
        return self._opening()

    def failure(self, error: Exception) -> Iterator[NamedEvent]:
        """See TurnShape."""
        message = error_reply(error).message
        yield from self._end(Outcome("failed", error={"code": "server_error", "message": message}))

    def whole(self) -> dict[str, Any]:
        """See TurnShape."""
        return self._ended

    def _opening(self) -> Iterator[NamedEvent]:
        if not self._num_events:
            response = self.envelope.response(Outcome(), [])
            is_large = self.request_bytes > _LARGE_REQUEST
            yield self._event("response.created", {"response": response}, is_large)
            yield self._event("response.in_progress", {"response": response}, is_large)

    def _of_block(self, event: BlockEvent, bytes_left: int) -> Iterator[NamedEvent]:
        """What shows the event, behind which its delta has so much more text."""
        match event:
            case Opened(block):
                yield from self._open(block)
            case Grown(block, text):
                yield from self._grow(block, text)
            case Closed(block):
                yield from self._close(block, bytes_left)

    def _open(self, block: Block) -> Iterator[NamedEvent]:
        place = {"output_index": block.index, "item": self.items.begun(block)}
        yield self._event("response.output_item.added", place)
        if block.kind != "call":
            part = text_part("") if block.kind == "text" else thought_part("")
            yield self._event("response.content_part.added", {**self._part(block), "part": part})

    def _grow(self, block: Block, text: str) -> Iterator[NamedEvent]:
        self._num_chars += len(text)
        match self.items.kind(block):
            case "message":
                told, is_large = self._tell_logprobs()
                fields = {**self._part(block), "delta": text, "logprobs": told}
                yield self._event("response.output_text.delta", fields, is_large)
            case "reasoning":
                yield self._event("response.reasoning_text.delta", {**self._part(block), "delta": text})
            case "function_call":
                fields = {**self._place(block), "delta": text}
                yield self._event("response.function_call_arguments.delta", fields)

    def _close(self, block: Block, bytes_left: int = 0) -> Iterator[NamedEvent]:
        item, is_large = self.items.whole(block, self._records(self._told)), _are_many(self._told)
        self._num_scores += num_scores(self._told)
        self._told, self._untold = [], self._last_untold(bytes_left)
        self.output.append(item)
        match item["type"]:
            case "message":
                yield from self._close_part(block, "response.output_text.done", item["content"][0], is_large)
            case "reasoning":
                yield from self._close_part(block, "response.reasoning_text.done", item["content"][0])
            case "function_call":
                done = {**self._place(block), "name": item["name"], "arguments": item["arguments"]}
                yield self._event("response.function_call_arguments.done", done)
            case "custom_tool_call":
                yield from self._close_custom(block, item["input"])
        yield self._event("response.output_item.done", {"output_index": block.index, "item": item}, is_large)

    def _close_part(
        self, block: Block, name: str, part: Item, is_large: bool = False
    ) -> Iterator[NamedEvent]:
        told: Item = {key: part[key] for key in ("text", "logprobs") if key in part}
        yield self._event(name, {**self._part(block), **told}, is_large)
        yield self._event("response.content_part.done", {**self._part(block), "part": part}, is_large)

    def _close_custom(self, block: Block, text: str) -> Iterator[NamedEvent]:
        """The input of a custom tool stands inside of JSON, and is known when that has ended."""
        place = self._place(block)
        if text:
            yield self._event("response.custom_tool_call_input.delta", {**place, "delta": text})
        yield self._event("response.custom_tool_call_input.done", {**place, "input": text})

    def _empty_message(self) -> Iterator[NamedEvent]:
        """A response without output would leave clients that look for its text without any."""
        block = Block(0, "text")
        yield from self._open(block)
        yield from self._close(block)

    def _end(self, outcome: Outcome, choice: Choice | None = None) -> Iterator[NamedEvent]:
        response = self._ended = self.envelope.response(outcome, self.output, choice)
        self.keep(response, self.output, self._num_scores)
        # There is no event for a cancelled response.
        name = "incomplete" if outcome.status == "cancelled" else outcome.status
        is_large = self.request_bytes > _LARGE_REQUEST or self._num_chars > LARGE_CHARS
        is_large |= self._num_scores > MANY_VALUES
        yield self._event(f"response.{name}", {"response": response}, is_large)

    def _place(self, block: Block) -> dict[str, object]:
        return {"item_id": self.items.item_id(block), "output_index": block.index}

    def _part(self, block: Block) -> dict[str, object]:
        return {**self._place(block), "content_index": 0}

    def _event(self, name: str, fields: dict[str, object], is_large: bool = False) -> NamedEvent:
        number = self._num_events
        self._num_events += 1
        return NamedEvent(name, {"type": name, "sequence_number": number, **fields}, is_large)

    def _last_untold(self, num_bytes: int) -> list[TokenLogprobs]:
        """Of the last tokens, as many as it takes to spell so much: the others are of what has ended."""
        at = len(self._untold)
        while at and num_bytes > 0 and self.spelling is not None:
            at -= 1
            num_bytes -= len(self.spelling.bytes(self._untold[at].token_id) or b"")
        return self._untold[at:]

    def _tell_logprobs(self) -> tuple[LongList, bool]:
        told, self._untold = self._untold, []
        self._told += told
        return self._records(told), _are_many(told)

    def _records(self, logprobs: Sequence[TokenLogprobs]) -> LongList:
        spelling = self.spelling
        return LongList(lambda: () if spelling is None else token_records(logprobs, spelling))


def _are_many(logprobs: Sequence[TokenLogprobs]) -> bool:
    return num_scores(logprobs) > MANY_VALUES
