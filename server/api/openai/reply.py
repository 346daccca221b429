"""Reply: one generation as an HTTP reply, JSON or SSE. What differs between the endpoints is a ReplyShape."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.responses import Response

from engine import FinishReason, OutputDelta, TokenLogprobs
from server.api.generation import Choice, Generation
from server.api.openai.protocol import GenerationBody
from server.api.usage import choice_usage, reply_metrics, reply_usage
from server.http.context import ServerContext
from server.http.errors import error_reply
from server.http.json_pieces import LargeJson, encoded_off_loop
from server.http.json_reply import json_response
from server.http.sse import DONE, EVENT_END, EVENT_START, KEEP_ALIVE, Silence, begin_stream, encode_event

# More than this is encoded off the loop: it would take the loop some milliseconds.
MANY_VALUES = 2_000
_CHARS_A_VALUE = 512  # text is fast

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Collected:
    """Everything one choice gave, for a reply in one piece."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    are_drafts: list[bool] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        """Append one delta."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.are_drafts += delta.are_drafts


class ReplyShape(Protocol):
    """How one endpoint spells its replies."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def chunks(self, choice: Choice, delta: OutputDelta) -> Iterator[dict[str, object]]:
        """The parts of the stream's chunks that show `delta`: none when it shows nothing."""
        ...

    def choice(self, choice: Choice, output: Collected) -> dict[str, object]:
        """One entry of `choices` in a JSON reply."""
        ...

    def extras(self, choices: list[Choice]) -> dict[str, object]:
        """What a JSON reply has beside its choices."""
        ...


def finish_fields(choice: Choice) -> dict[str, object]:
    """`finish_reason` and `stop_reason`, both null while the choice runs."""
    finish = choice.finish
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": _FINISH_REASONS.get(finish.reason, "abort"), "stop_reason": finish.stop_reason}


def tells_tokens(body: GenerationBody) -> bool:
    """Whether the reply says anything of each token beside its text and log-probability."""
    return bool(body.return_token_ids or body.return_token_origins)


def token_fields(body: GenerationBody, output: OutputDelta | Collected) -> dict[str, object]:
    """The lists with an entry for each token of `output` that `body` asks for."""
    fields: dict[str, object] = {}
    if body.return_token_ids:
        fields["token_ids"] = list(output.token_ids)
    if body.return_token_origins:
        fields["token_origins"] = ["draft" if is_draft else "target" for is_draft in output.are_drafts]
    return fields


def _last(error: Exception | None) -> list[bytes]:
    """A late error is an event as well, and `[DONE]` is always last."""
    return [DONE] if error is None else [encode_event(error_reply(error).body()), DONE]


def fresh_id(shape: ReplyShape | type[ReplyShape]) -> str:
    """A reply's id; the caller's own label never becomes one."""
    return f"{shape.id_prefix}-{uuid.uuid4().hex}"


class Reply:
    """Turns a generation into a response and closes it, however that ends."""

    def __init__(
        self, context: ServerContext, body: GenerationBody, shape: ReplyShape, reply_id: str
    ) -> None:
        options = body.stream_options
        self._settings = context.settings.server
        self._turns = context.large_replies
        self._shape = shape
        self._tells_ids = bool(body.return_token_ids)
        self._tells_origins = bool(body.return_token_origins)
        self._includes_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._streams = bool(body.stream)
        self._predicted = body.prediction is not None
        self._envelope = {
            "id": reply_id,
            "object": shape.chunk_object_name if self._streams else shape.object_name,
            "created": int(time.time()),
            "model": body.model or context.served_names[0],
        }
        if body.service_tier is not None:
            self._envelope["service_tier"] = "default" if body.service_tier == "auto" else body.service_tier

    async def respond(self, generation: Generation) -> Response:
        """The response: at the first event of a stream, or at the end for JSON.

        Raises what the generation ends with before that: nothing has been sent, so it can be a status.
        """
        if not self._streams:
            try:
                return await self._whole(generation)
            finally:
                generation.close()
        return await begin_stream(self._chunks(generation), generation.close, _last)

    async def _chunks(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        silence = Silence(self._settings.sse_keepalive_seconds)
        while generation.is_open:
            try:
                async with silence.limit():
                    choice, delta = await generation.next()
            except TimeoutError:
                yield KEEP_ALIVE
                silence.end()
                continue
            is_large = self._num_values(choice, delta, not choice.started) > MANY_VALUES
            for part in self._shape.chunks(choice, delta):
                event = {**self._envelope, **part, **self._chunk_usage(choice)}
                if not is_large:
                    yield encode_event(event)
                    silence.end()
                    continue
                yield EVENT_START
                async with aclosing(encoded_off_loop(event, self._turns)) as pieces:
                    async for piece in pieces:
                        yield piece
                yield EVENT_END
                silence.end()
        if self._includes_usage:
            yield encode_event({**self._envelope, "choices": [], **self._totals(generation)})

    def _chunk_usage(self, choice: Choice) -> dict[str, object]:
        if self._continuous_usage:
            return {"usage": choice_usage(choice, predicted=self._predicted)}
        return {"usage": None} if self._includes_usage else {}

    def _totals(self, generation: Generation) -> dict[str, object]:
        totals: dict[str, object] = {"usage": reply_usage(generation.choices, predicted=self._predicted)}
        if self._settings.per_request_metrics:
            totals["metrics"] = reply_metrics(generation.choices)
        return totals

    async def _whole(self, generation: Generation) -> Response:
        """The reply in one piece; a large one is made and encoded off the loop, while it is being sent."""
        outputs = [Collected() for _ in generation.choices]
        while generation.is_open:
            choice, delta = await generation.next()
            outputs[choice.index].add(delta)
        choices = list(generation.choices)
        values = sum(
            self._num_values(choice, output, first=True)
            for choice, output in zip(choices, outputs, strict=True)
        )
        entries = (self._shape.choice(choice, outputs[choice.index]) for choice in choices)
        reply = {
            **self._envelope,
            "choices": entries,
            **self._shape.extras(choices),
            **self._totals(generation),
        }
        return json_response(reply) if values <= MANY_VALUES else LargeJson(reply, self._turns)

    def _num_values(self, choice: Choice, output: OutputDelta | Collected, first: bool) -> int:
        """About how many values show `output`, with those of the prompt when it is the choice's first."""
        prompt = choice.prompt
        values = 1 + num_scores(output.logprobs) + sum(map(len, output.text)) // _CHARS_A_VALUE
        if self._tells_ids:
            values += len(output.token_ids) + (len(prompt.token_ids) if first else 0)
        if self._tells_origins:
            values += len(output.are_drafts)
        if first:
            values += len(prompt.text or "") // _CHARS_A_VALUE
            values += 0 if prompt.scores is None else num_scores(prompt.scores.records)
        return values


def num_scores(logprobs: Sequence[TokenLogprobs]) -> int:
    """Log-probabilities of these tokens and of the likeliest beside them."""
    return len(logprobs) * (1 + len(logprobs[0].top)) if logprobs else 0
