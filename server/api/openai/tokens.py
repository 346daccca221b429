"""/tokenize, /detokenize and /tokenizer_info: the model's tokenizer for clients, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from sys import getsizeof

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, ReplyFormat
from server.api.body import read_fields
from server.api.long_list import LongList
from server.api.off_loop import off_loop
from server.api.openai.chat_input import ChatInput, messages_for_template
from server.api.openai.models import check_model
from server.api.openai.protocol import ChatMessage
from server.api.openai.protocol_refusals import ON_TOKENIZE
from server.api.openai.protocol_tokens import DetokenizeRequest, TokenizeRequest
from server.api.openapi import json_body
from server.http.body_room import lease_of
from server.http.context import ServerContext, context_of, exchange_of
from server.http.errors import invalid
from server.http.json_pieces import LargeJson
from server.http.json_reply import json_response

router = APIRouter(tags=["tokens"])

_MANY_VALUES = 2_000  # more than these are encoded off the loop
_CHARS_A_VALUE = 16


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest, {"prompt": "Name three rivers."}))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a conversation, as generating from it would read them."""
    context = context_of(request)
    engine, tenant = context.engine, exchange_of(request.scope).tenant
    with engine.admit_text(tenant):
        body = await read_fields(request, TokenizeRequest, ON_TOKENIZE)
        check_model(context, body.model)
        token_ids = await read_token_ids(request, body, engine, tenant)
    names = LongList(lambda: map(engine.tokenizer.token_name, token_ids))
    reply = {
        "count": len(token_ids),
        "max_model_len": engine.info.max_model_len,
        "tokens": token_ids,
        "token_strs": names if body.return_token_strs else None,
    }
    return _response(context, reply, len(token_ids))


def _response(context: ServerContext, reply: Mapping[str, object], num_values: int) -> Response:
    """A large reply is encoded off the loop, as it is read."""
    return json_response(reply) if num_values <= _MANY_VALUES else LargeJson(reply, context.large_replies)


async def read_token_ids(
    request: Request, body: TokenizeRequest, engine: Engine, tenant: str | None
) -> list[int]:
    """Special tokens are added to a text unless refused, to a conversation only when asked for."""
    if body.prompt is not None and body.messages is None:
        with_special = body.add_special_tokens is not False
        return await engine.text.encode(body.prompt, add_special_tokens=with_special, tenant=tenant)
    if body.messages is None or body.prompt is not None:
        raise invalid("Give either 'prompt' or 'messages'.", "prompt")
    call = partial(_shown, body, body.messages, engine.reply_format)
    shown = await off_loop(context_of(request), lease_of(request.scope).num_bytes, call)
    return await shown.render(engine, add_special_tokens=bool(body.add_special_tokens), tenant=tenant)


def _shown(body: TokenizeRequest, messages: Sequence[ChatMessage], form: ReplyFormat) -> ChatInput:
    tools = [tool.spec().for_template() for tool in body.tools or ()]
    return ChatInput(messages_for_template(messages, form), tools, body.chat_template_kwargs or {})


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest, {"tokens": [72, 105]}))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens spelled out."""
    context, lease = context_of(request), lease_of(request.scope)
    engine, tenant = context.engine, exchange_of(request.scope).tenant
    with engine.admit_text(tenant):
        body = await read_fields(request, DetokenizeRequest, {})
        check_model(context, body.model)
        text = await engine.text.decode(body.tokens, skip_special_tokens=False, param="tokens", tenant=tenant)
    lease.hold(getsizeof(text))
    return _response(context, {"prompt": text}, len(text) // _CHARS_A_VALUE)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to tokenize and to render conversations by itself."""
    context = context_of(request)
    limit = context.engine.info.max_model_len
    return json_response({**context.engine.tokenizer.describe(), "model_max_length": limit})
