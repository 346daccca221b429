"""POST /infill: what stands between two texts of a file, for editors made for llama.cpp."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, Finish, FinishReason, OutputDelta
from server.api.blocks import BlockEvent, Grown
from server.api.body import read_request
from server.api.fill_in import FillIn, OtherFile, fill_in_prompt, marks_of
from server.api.generation import Choice, Prompt
from server.api.llama_cpp.protocol import InfillRequest, InfillTurn
from server.api.openai.models import check_model
from server.api.openai.protocol_refusals import ON_COMPLETIONS
from server.api.openapi import json_body
from server.api.submission import Submission, open_generation
from server.api.turn_reply import LARGE_CHARS, NamedEvent, respond
from server.http.body_room import lease_of
from server.http.context import context_of, exchange_of
from server.http.errors import error_reply
from server.http.sse import BARE_EVENTS

router = APIRouter(tags=["generation"])

Json = dict[str, Any]

_EXAMPLE = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 32}
_STOP_TYPES = {FinishReason.STOP: "eos", FinishReason.LENGTH: "limit"}


@router.post("/infill", openapi_extra=json_body(InfillRequest, _EXAMPLE))
async def infill(request: Request) -> Response:
    """Write what stands between two texts, with a model that fills in the middle."""
    context, exchange = context_of(request), exchange_of(request.scope)
    body = await read_request(request, InfillRequest, ON_COMPLETIONS)
    check_model(context, body.model)
    marks = marks_of(context.engine, "input_prefix")
    turn = turn_body(body, sorted(marks.ends))
    shape = InfillShape(body.model or context.served_names[0], body.response_fields)
    asked = _asked(body, turn.max_tokens)
    streams = bool(body.stream)
    del body  # what of it is large ends with the prompt

    async def prepare(engine: Engine) -> list[Prompt]:
        nonlocal asked
        token_ids, shape.is_cut = await fill_in_prompt(engine, asked, tenant=exchange.tenant)
        asked = FillIn("", "")
        return [Prompt(token_ids)]

    submission = Submission(
        reply_id=f"infill-{uuid.uuid4().hex}",
        endpoint=request.scope["path"],
        body=turn,
        num_prompts=1,
        prepare=prepare,
        exchange=exchange,
        lease=lease_of(request.scope),
    )
    generation = await open_generation(context, submission)
    return await respond(context, generation, shape, streams=streams, framing=BARE_EVENTS)


def turn_body(body: InfillRequest, ends: list[int]) -> InfillTurn:
    """The same request as a completion, which `ends` end, too."""
    turn = InfillTurn.model_construct(**body.extras(), model=body.model, prompt=[""], stream=body.stream)
    turn.stop, turn.stop_token_ids, turn.logit_bias = body.stop, ends, body.logit_bias
    turn.max_tokens = None if body.n_predict is None or body.n_predict < 0 else body.n_predict
    turn.repetition_penalty = body.repetition_penalty or body.repeat_penalty
    return turn


def _asked(body: InfillRequest, max_tokens: int | None) -> FillIn:
    files = [OtherFile(each.filename or "", each.text) for each in body.input_extra or ()]
    before = body.input_prefix + (body.prompt or "")
    return FillIn(before, body.input_suffix, files, room_for=max(1, max_tokens or 0))


@dataclass(slots=True)
class InfillShape:
    """llama.cpp's reply. `fields` are those asked for, None for all; with `is_cut` the prompt was cut."""

    model: str
    fields: Sequence[str] | None
    is_cut: bool = False
    _texts: list[str] = field(default_factory=list, init=False)
    _whole: Json = field(default_factory=dict, init=False)

    def events(
        self, choice: Choice, delta: OutputDelta, blocks: Sequence[BlockEvent]
    ) -> Iterator[NamedEvent]:
        """See TurnShape."""
        for each in blocks:
            if isinstance(each, Grown):
                self._texts.append(each.text)
                yield NamedEvent("", {"index": 0, "content": each.text, "stop": False})
        if delta.finish is not None:
            text, told = "".join(self._texts), self._ending(choice, delta.finish)
            self._whole = self._asked({**told, "content": text})
            yield NamedEvent("", self._asked({**told, "content": ""}), len(text) > LARGE_CHARS)

    def silence(self) -> Iterable[NamedEvent]:
        """See TurnShape."""
        return ()

    def failure(self, error: Exception) -> Iterable[NamedEvent]:
        """See TurnShape."""
        return [NamedEvent("", error_reply(error).body())]

    def whole(self) -> Json:
        """See TurnShape."""
        return self._whole

    def _ending(self, choice: Choice, finish: Finish) -> Json:
        word = finish.stop_reason if isinstance(finish.stop_reason, str) else ""
        return {
            "index": 0,
            "content": "",
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": finish.num_prompt_tokens,
            "tokens_cached": finish.num_cached_tokens,
            "truncated": self.is_cut,
            "stop_type": "word" if word else _STOP_TYPES.get(finish.reason, "none"),
            "stopping_word": word,
            "timings": timings(finish),
        }

    def _asked(self, told: Mapping[str, Any]) -> Json:
        if self.fields is None:
            return dict(told)
        found: Json = {}
        for path in self.fields:
            value: Any = told
            for step in path.split("/"):
                value = value.get(step) if isinstance(value, Mapping) else None
            if value is not None:
                found[path] = value
        return found


def timings(finish: Finish) -> Json:
    """llama.cpp's: tokens and milliseconds of the prompt and of what follows it."""
    timing = finish.timing
    num_read = finish.num_prompt_tokens - finish.num_cached_tokens
    prompt_s = max(0.0, (timing.time_to_first_token_s or 0.0) - timing.queue_s)
    return {
        "cache_n": finish.num_cached_tokens,
        **_pace("prompt", num_read, prompt_s),
        **_pace("predicted", finish.num_output_tokens, timing.generation_s),
    }


def _pace(part: str, number: int, seconds: float) -> Json:
    return {
        f"{part}_n": number,
        f"{part}_ms": round(seconds * 1000, 3),
        f"{part}_per_token_ms": round(seconds * 1000 / number, 3) if number else 0.0,
        f"{part}_per_second": round(number / seconds, 3) if seconds > 0 else 0.0,
    }
