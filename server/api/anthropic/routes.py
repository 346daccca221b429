"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import ContextLengthExceeded, ReplyFormat
from server.api.anthropic.conversation import skipped_kinds, turn_body
from server.api.anthropic.message import MessageShape
from server.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from server.api.body import read_request, report_ignored
from server.api.off_loop import off_loop
from server.api.openai.chat import open_chat_body
from server.api.openai.chat_input import ChatInput, chat_input
from server.api.openai.chat_tools import read_tools
from server.api.openai.models import check_model
from server.api.openapi import json_body
from server.api.param_names import renamed_params
from server.api.turn_reply import respond
from server.http.body_room import lease_of
from server.http.context import context_of, exchange_of
from server.http.errors import ApiError, error_reply
from server.http.json_reply import json_response

router = APIRouter(tags=["generation"])

_NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}
_MESSAGES = [{"role": "user", "content": "Name three rivers."}]
_EXAMPLE = {"messages": _MESSAGES, "temperature": 0.2, "max_tokens": 60}


@router.post("/v1/messages", openapi_extra=json_body(MessagesRequest, _EXAMPLE))
async def create_message(request: Request) -> Response:
    """Write the assistant's next message."""
    context, exchange = context_of(request), exchange_of(request.scope)
    body = await read_request(request, MessagesRequest, {})
    num_bytes = lease_of(request.scope).num_bytes
    report_ignored(request, await off_loop(context, num_bytes, partial(skipped_kinds, body)))
    model, max_tokens = body.model or context.served_names[0], body.max_tokens
    message_id = f"msg_{uuid.uuid4().hex}"
    hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"
    with renamed_params(_NAMES), _too_long_in_their_words():
        asked = await off_loop(context, num_bytes, partial(turn_body, body))
        del body  # what of it is large ends with the prompt
        generation = await open_chat_body(request, asked, message_id)
    shape = MessageShape(
        message_id=message_id,
        model=model,
        num_prompt_tokens=len(generation.choices[0].prompt.token_ids),
        max_tokens=max_tokens,
        tells_metrics=context.settings.server.per_request_metrics,
        request_id=exchange.request_id,
        hides_thoughts=hides_thoughts,
    )
    return await respond(context, generation, shape, streams=bool(asked.stream))


@router.post(
    "/v1/messages/count_tokens", openapi_extra=json_body(CountTokensRequest, {"messages": _MESSAGES})
)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a message has."""
    context = context_of(request)
    engine, tenant = context.engine, exchange_of(request.scope).tenant
    with engine.admit_text(tenant), renamed_params(_NAMES), _too_long_in_their_words():
        body = await read_request(request, CountTokensRequest, {})
        num_bytes = lease_of(request.scope).num_bytes
        report_ignored(request, await off_loop(context, num_bytes, partial(skipped_kinds, body)))
        check_model(context, body.model)
        shown = await off_loop(context, num_bytes, partial(_shown, body, engine.reply_format))
        token_ids = await shown.render(engine, add_special_tokens=False, tenant=tenant)
    return json_response({"input_tokens": len(token_ids)})


def _shown(body: CountTokensRequest, form: ReplyFormat) -> ChatInput:
    asked = turn_body(body)
    return chat_input(asked, read_tools(asked), form)


@contextmanager
def _too_long_in_their_words() -> Iterator[None]:
    """Agents look for these words of Anthropic's, and then shorten the conversation."""
    try:
        yield
    except ContextLengthExceeded as error:
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        raise ApiError(replace(error_reply(error), message=message)) from error
