"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, OutputDelta, TokenLogprobs
from server.body import read_request
from server.context import context_of, exchange_of
from server.errors import invalid
from server.generation import Choice, Order, Prompt, open_generation, truncated
from server.logprobs import TokenSpelling, chat_logprobs, prompt_logprobs
from server.models import check_model
from server.openapi import json_body
from server.protocol import ChatCompletionRequest, ChatMessage
from server.protocol_refusals import ON_CHAT
from server.reply import Collected, Reply, finish_fields, fresh_id

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Write the assistant's next message."""
    context = context_of(request)
    body = await read_request(request, ChatCompletionRequest, ON_CHAT)
    check_model(context, body.model)
    messages = [message_for_template(i, message) for i, message in enumerate(body.messages)]
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")

    async def prepare(engine: Engine) -> list[Prompt]:
        token_ids = await engine.render_chat(messages, add_special_tokens=bool(body.add_special_tokens))
        return [Prompt(truncated(body, token_ids, engine.info))]

    shape = ChatShape(body, TokenSpelling.of(context.engine, body))
    order = Order(fresh_id(shape), body, 1, prepare, exchange_of(request.scope))
    generation = await open_generation(context, order)
    return await Reply(context, body, shape, order.reply_id).respond(generation)


def message_for_template(index: int, message: ChatMessage) -> dict[str, object]:
    """What the chat template sees of one message. Raises ApiError for what it could not be shown."""
    if message.tool_calls:
        name = f"messages[{index}].tool_calls"
        raise invalid(f"'{name}' is not supported yet.", name)
    if message.content is None and message.role != "assistant":
        name = f"messages[{index}].content"
        raise invalid(f"'{name}' is missing: only an assistant's message may have none.", name)
    # Templates know the older name of the role.
    shown: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content or "",
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


@dataclass(frozen=True, slots=True)
class ChatShape:
    """OpenAI's chat.completion objects."""

    body: ChatCompletionRequest
    spelling: TokenSpelling

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def chunks(self, choice: Choice, delta: OutputDelta) -> Iterator[dict[str, object]]:
        """The role with the first token, then text, then an empty delta with the end."""
        if not choice.started:
            choice.started = True
            opening = self._chunk(choice, {"role": "assistant", "content": ""})
            if self.body.return_token_ids:
                opening["prompt_token_ids"] = list(choice.prompt.token_ids)
            yield {**opening, **self._prompt_logprobs(choice)}
        if delta.text or delta.logprobs or (self.body.return_token_ids and delta.token_ids):
            yield self._chunk(choice, {"content": delta.text}, delta)
        if delta.finish is not None:
            ending = {"index": choice.index, "delta": {}, "logprobs": None, **finish_fields(choice)}
            yield {"choices": [ending]}

    def _chunk(
        self, choice: Choice, message: dict[str, object], delta: OutputDelta | None = None
    ) -> dict[str, object]:
        entry = {
            "index": choice.index,
            "delta": message,
            "logprobs": None if delta is None else self._logprobs(delta.logprobs),
            "finish_reason": None,
        }
        if delta is not None and self.body.return_token_ids:
            entry["token_ids"] = list(delta.token_ids)
        return {"choices": [entry]}

    def choice(self, choice: Choice, output: Collected) -> dict[str, object]:
        """The whole choice."""
        entry = {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(output.text), "refusal": None},
            "logprobs": self._logprobs(output.logprobs),
            **finish_fields(choice),
        }
        if self.body.return_token_ids:
            entry["token_ids"] = output.token_ids
        return entry

    def extras(self, choices: list[Choice]) -> dict[str, object]:
        """What is told of the prompt, which all choices share."""
        extras = self._prompt_logprobs(choices[0])
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = list(choices[0].prompt.token_ids)
        return extras

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, object] | None:
        return chat_logprobs(logprobs, self.spelling) if self.body.logprobs else None

    def _prompt_logprobs(self, choice: Choice) -> dict[str, object]:
        scores, number = choice.prompt.scores, self.body.prompt_logprobs
        if number is None or scores is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(scores.records, number, self.spelling.text)}
