"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, OutputDelta, TokenLogprobs
from server.api.body import read_request
from server.api.fill_in import FillIn, fill_in_prompt, marks_of
from server.api.generation import Choice, Generation, Prompt
from server.api.long_list import LongList
from server.api.openai.logprobs import (
    TEXT_START,
    TokenSpelling,
    completion_logprobs,
    echoed_logprobs,
    joined,
    place_behind,
    prompt_logprobs,
)
from server.api.openai.models import check_model
from server.api.openai.protocol import CompletionRequest
from server.api.openai.protocol_refusals import ON_COMPLETIONS
from server.api.openai.protocol_values import PromptItem
from server.api.openai.reply import Collected, Reply, finish_fields, fresh_id, tells_tokens, token_fields
from server.api.openapi import json_body
from server.api.submission import Submission, open_generation, truncated
from server.http.body_room import lease_of
from server.http.context import context_of, exchange_of
from server.http.errors import invalid

router = APIRouter(tags=["generation"])

_EXAMPLE = {"prompt": "The capital of France is", "temperature": 0.2, "max_tokens": 20}


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest, _EXAMPLE))
async def create_completion(request: Request) -> Response:
    """Continue a prompt, or several."""
    reply, generation = await open_completion(request)
    return await reply.respond(generation)


async def open_completion(request: Request) -> tuple[Reply, Generation]:
    """The generation that a request asks for, and what replies with it. What came with it ends here.

    Raises ApiError or an EngineError.
    """
    context = context_of(request)
    body = await read_request(request, CompletionRequest, ON_COMPLETIONS)
    shape = CompletionShape(body, TokenSpelling.of(context.engine, body))
    reply_id = fresh_id(shape)
    reply = Reply(context, body, shape, reply_id)
    return reply, await open_completion_body(request, body, reply_id)


async def open_completion_body(request: Request, body: CompletionRequest, reply_id: str) -> Generation:
    """The generation that a completion's body asks for, by whichever API it came; `reply_id` is fresh.

    Raises ApiError or an EngineError.
    """
    context, exchange = context_of(request), exchange_of(request.scope)
    check_model(context, body.model)
    if body.suffix:
        prepare_fill_in(body, context.engine)
    submission = Submission(
        reply_id=reply_id,
        endpoint=request.scope["path"],
        body=body,
        num_prompts=len(body.prompt),
        prepare=lambda engine: read_prompts(body, engine, exchange.tenant),
        exchange=exchange,
        lease=lease_of(request.scope),
    )
    return await open_generation(context, submission)


def prepare_fill_in(body: CompletionRequest, engine: Engine) -> None:
    """Have the reply end where the model says that the middle does. Raises ApiError where it knows none."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise invalid(f"'{name}' and 'suffix' cannot be used together.", name)
    body.stop_token_ids = sorted({*(body.stop_token_ids or ()), *marks_of(engine).ends})


async def read_prompts(body: CompletionRequest, engine: Engine, tenant: str | None) -> list[Prompt]:
    """The prompts as the model reads them, with their text when it is to be echoed; in `tenant`'s turns."""
    return [await _read_prompt(body, item, engine, tenant) for item in body.prompt]


async def _read_prompt(
    body: CompletionRequest, item: PromptItem, engine: Engine, tenant: str | None
) -> Prompt:
    with_special = body.add_special_tokens is not False
    if body.suffix:
        asked = FillIn(item, body.suffix, add_special_tokens=with_special)
        token_ids, _ = await fill_in_prompt(engine, asked, tenant=tenant)
        return Prompt(token_ids)
    if isinstance(item, str):
        if body.truncate_prompt_tokens is not None:  # none of what is kept stands before as much
            item = item[-engine.tokenizer.char_limit(engine.info.max_model_len) :]
        all_ids = await engine.text.encode(item, add_special_tokens=with_special, tenant=tenant)
    else:
        all_ids = item
    kept = truncated(body, all_ids, engine.info)
    if not body.echo:
        return Prompt(kept)
    if isinstance(item, str) and len(kept) == len(all_ids):
        return Prompt(kept, item)
    skip = body.skip_special_tokens is not False
    return Prompt(kept, await engine.text.decode(kept, skip_special_tokens=skip, tenant=tenant))


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """OpenAI's text_completion objects."""

    body: CompletionRequest
    spelling: TokenSpelling

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def chunks(self, choice: Choice, delta: OutputDelta) -> Iterator[dict[str, object]]:
        """One chunk with text and end together; none for a delta that shows nothing."""
        first, choice.started = not choice.started, True
        logprobs = self._logprobs(choice, delta.logprobs, first)
        text = (choice.prompt.text or "") + delta.text if first else delta.text
        tells_prompt = first and choice.prompt.scores is not None
        if not (text or delta.finish or delta.logprobs or tells_tokens(self.body) or tells_prompt):
            return
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            **finish_fields(choice),
            **(self._prompt_logprobs(choice) if first else {}),
        }
        if self.body.return_token_ids:
            entry["prompt_token_ids"] = list(choice.prompt.token_ids) if first else None
        entry |= token_fields(self.body, delta)
        yield {"choices": [entry]}

    def choice(self, choice: Choice, output: Collected) -> dict[str, object]:
        """The whole choice."""
        entry = {
            "index": choice.index,
            "text": (choice.prompt.text or "") + "".join(output.text),
            "logprobs": self._logprobs(choice, output.logprobs, first=True),
            **finish_fields(choice),
            **self._prompt_logprobs(choice),
        }
        if self.body.return_token_ids:
            entry["prompt_token_ids"] = list(choice.prompt.token_ids)
        return entry | token_fields(self.body, output)

    def extras(self, choices: list[Choice]) -> dict[str, object]:
        """Nothing."""
        return {}

    def _logprobs(
        self, choice: Choice, logprobs: Sequence[TokenLogprobs], first: bool
    ) -> dict[str, LongList] | None:
        """The logprobs object, which begins with an echoed prompt's; moves the choice's text offset on."""
        if self.body.logprobs is None:
            return None
        prompt, spelling = choice.prompt, self.spelling
        echoed: dict[str, LongList] = {}
        if first and self.body.echo and prompt.scores is not None:
            echoed = echoed_logprobs(prompt.token_ids, prompt.scores.records, self.body.logprobs, spelling)
            choice.text_place = place_behind(prompt.token_ids, spelling, TEXT_START)
        result = completion_logprobs(logprobs, spelling, choice.text_place)
        token_ids = (each.token_id for each in logprobs)
        choice.text_place = place_behind(token_ids, spelling, choice.text_place)
        return {name: joined(echoed[name], each) for name, each in result.items()} if echoed else result

    def _prompt_logprobs(self, choice: Choice) -> dict[str, object]:
        """The prompt's own, where they are asked for."""
        scores, number = choice.prompt.scores, self.body.prompt_logprobs
        if number is None or scores is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(scores.records, number, self.spelling.text)}
