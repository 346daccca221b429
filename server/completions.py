"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, OutputDelta, TokenLogprobs
from server.body import read_request
from server.context import ServerContext, context_of, exchange_of
from server.generation import Choice, Order, Prompt, open_generation, truncated
from server.logprobs import TokenText, completion_logprobs
from server.models import check_model
from server.openapi import json_body
from server.protocol import CompletionRequest
from server.protocol_refusals import ON_COMPLETIONS
from server.protocol_values import PromptItem
from server.reply import Collected, Reply, finish_fields, fresh_id
from server.sampling import check_token_ids

router = APIRouter(tags=["generation"])


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue a prompt, or several."""
    context = context_of(request)
    body = await read_request(request, CompletionRequest, ON_COMPLETIONS)
    check_model(context, body.model)
    shape = CompletionShape(body, context.engine.token_text)
    order = Order(
        reply_id=fresh_id(shape),
        body=body,
        num_prompts=len(body.prompt),
        prepare=lambda engine: read_prompts(body, engine),
        exchange=exchange_of(request.scope),
    )
    return await answer(context, order, shape)


async def answer(context: ServerContext, order: Order, shape: CompletionShape) -> Response:
    """Open the generation, then reply with it."""
    generation = await open_generation(context, order)
    return await Reply(context, order.body, shape, order.reply_id).respond(generation)


async def read_prompts(body: CompletionRequest, engine: Engine) -> list[Prompt]:
    """The prompts as the model reads them, with their text when it is to be echoed."""
    return [await _read_prompt(body, item, engine) for item in body.prompt]


async def _read_prompt(body: CompletionRequest, item: PromptItem, engine: Engine) -> Prompt:
    if isinstance(item, str):
        all_ids = await engine.encode(item, add_special_tokens=body.add_special_tokens is not False)
    else:
        all_ids = item
        check_token_ids("prompt", all_ids, engine.info.vocab_size)
    token_ids = truncated(body, all_ids, engine.info)
    if not body.echo:
        return Prompt(token_ids)
    if isinstance(item, str) and len(token_ids) == len(all_ids):
        return Prompt(token_ids, item)
    skip = body.skip_special_tokens is not False
    return Prompt(token_ids, await engine.decode(token_ids, skip_special_tokens=skip))


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """OpenAI's text_completion objects."""

    body: CompletionRequest
    token_text: TokenText

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def chunks(self, choice: Choice, delta: OutputDelta) -> Iterator[dict[str, object]]:
        """One chunk with text and end together; none for a delta that shows nothing."""
        first, choice.started = not choice.started, True
        text = (choice.prompt.text or "") + delta.text if first else delta.text
        carries_ids = bool(self.body.return_token_ids)
        if not (text or delta.finish or delta.logprobs or carries_ids):
            return
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, delta.logprobs),
            **finish_fields(choice),
        }
        if carries_ids:
            entry["prompt_token_ids"] = list(choice.prompt.token_ids) if first else None
            entry["token_ids"] = list(delta.token_ids)
        yield {"choices": [entry]}

    def choice(self, choice: Choice, output: Collected) -> dict[str, object]:
        """The whole choice."""
        entry = {
            "index": choice.index,
            "text": (choice.prompt.text or "") + "".join(output.text),
            "logprobs": self._logprobs(choice, output.logprobs),
            **finish_fields(choice),
        }
        if self.body.return_token_ids:
            entry["prompt_token_ids"] = list(choice.prompt.token_ids)
            entry["token_ids"] = output.token_ids
        return entry

    def extras(self, choices: list[Choice]) -> dict[str, object]:
        """Nothing."""
        return {}

    def _logprobs(
        self, choice: Choice, logprobs: tuple[TokenLogprobs, ...] | list[TokenLogprobs]
    ) -> dict[str, object] | None:
        """The logprobs object; moves the choice's text offset on."""
        if self.body.logprobs is None:
            return None
        result = completion_logprobs(logprobs, self.token_text, choice.text_offset)
        choice.text_offset += sum(len(self.token_text(each.token_id)) for each in logprobs)
        return result
