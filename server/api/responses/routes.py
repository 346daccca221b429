"""POST /v1/responses; GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import read_request, report_ignored
from server.api.call_arguments import arguments_in
from server.api.off_loop import off_loop
from server.api.openai.chat import open_chat_body
from server.api.openai.logprobs import TokenSpelling
from server.api.openai.protocol_structure import JsonSchemaFormat, ResponseFormat
from server.api.openapi import json_body
from server.api.param_names import renamed_params
from server.api.reply_size import HELD_SCORE_BYTES
from server.api.responses.conversation import messages_of, text_length
from server.api.responses.events import Keep, ResponsesShape
from server.api.responses.output import Envelope, Item, ItemSpelling, ServedBy
from server.api.responses.protocol import REFUSALS, ResponsesRequest, ResponsesTurn, TextFormat
from server.api.responses.protocol_items import FunctionCallItem, InputItem, ReferenceItem, hosted_kinds
from server.api.responses.store import StoredResponse, StoredResponses
from server.api.responses.tools import ToolSet, choose, read_tool_set
from server.api.turn_reply import LARGE_CHARS, respond
from server.http.body_room import lease_of
from server.http.context import ServerContext, context_of, exchange_of
from server.http.errors import INVALID, NOT_FOUND, ApiError, ErrorReply, invalid, shown
from server.http.json_pieces import LargeJson
from server.http.json_reply import json_response

router = APIRouter(tags=["generation"])

ResponseId = Annotated[str, Path(description="The id of a stored response.")]

_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)
_NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}
_STORED_BYTES = 2048  # of a response, beside its texts
_CHAR_BYTES = 4
_EXAMPLE = {"input": "Name three rivers.", "temperature": 0.2, "max_output_tokens": 60}


@router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest, _EXAMPLE))
async def create_response(request: Request) -> Response:
    """Continue a conversation of items: text, reasoning, calls and what they gave."""
    context = context_of(request)
    body = await read_request(request, ResponsesRequest, REFUSALS)
    num_bytes = lease_of(request.scope).num_bytes
    response_id = f"resp_{uuid.uuid4().hex}"
    past = _Past.of(request, body, num_bytes)
    tools = await off_loop(context, num_bytes, lambda: read_tool_set(body.tools or ()))
    report_ignored(request, [*tools.skipped, *hosted_kinds(body.input or ()), *_unread(body)])
    turn_body = await off_loop(context, past.num_bytes, lambda: _turn_body(body, past.items, tools))
    envelope = Envelope.of(body, tools, response_id, _served_by(context))
    spelling = TokenSpelling.of(context.engine, turn_body) if body.includes_logprobs else None
    items = ItemSpelling(response_id, tools, encodes_thoughts=body.includes_encrypted)
    keep = past.keeper(context.responses, response_id) if body.is_stored else _forget
    with renamed_params(_NAMES):
        generation = await open_chat_body(
            request, turn_body, response_id, echoes=True, past_bytes=past.num_bytes
        )
    shape = ResponsesShape(envelope, items, keep, spelling, num_bytes)
    return await respond(context, generation, shape, streams=bool(turn_body.stream))


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: ResponseId) -> Response:
    """A stored response, as it ended."""
    context = context_of(request)
    found = context.responses.find(response_id, exchange_of(request.scope).tenant)
    if found is None:
        raise response_not_found(response_id)
    is_large = found.num_bytes > LARGE_CHARS
    return LargeJson(found.reply, context.large_replies) if is_large else json_response(found.reply)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: ResponseId) -> Response:
    """Forget a stored response; those that continue it stay."""
    if not context_of(request).responses.delete(response_id, exchange_of(request.scope).tenant):
        raise response_not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def response_not_found(name: str) -> ApiError:
    """A 404 for a response that is not stored, or is not the caller's: the two look the same."""
    message = f"The response '{shown(name)}' does not exist or is no longer stored."
    return ApiError(ErrorReply(404, NOT_FOUND, message, "response_id", "response_not_found"))


def _served_by(context: ServerContext) -> ServedBy:
    info = context.info  # while the model loads, the reply is a refusal
    advised = {} if info is None else info.default_sampling
    return ServedBy(context.served_names[0], advised, context.settings.server.per_request_metrics)


@dataclass(frozen=True, slots=True)
class _Past:
    """The conversation up to the reply, and for whom it is kept."""

    tenant: str | None
    items: Sequence[InputItem]
    num_bytes: int

    @classmethod
    def of(cls, request: Request, body: ResponsesRequest, num_bytes: int) -> _Past:
        """Raises ApiError for a response or an item that is not there, and for an empty conversation."""
        stored, tenant = context_of(request).responses, exchange_of(request.scope).tenant
        items = [_resolved(item, stored, tenant) for item in body.input or ()]
        num_bytes += _hold_references(request, body.input or (), items)
        name = body.previous_response_id
        previous = None if name is None else stored.resume(name, tenant)
        if name is not None and previous is None:
            message = f"The previous response '{shown(name)}' does not exist or is no longer stored."
            code = "previous_response_not_found"
            raise ApiError(ErrorReply(400, INVALID, message, "previous_response_id", code))
        if previous is not None:
            items, num_bytes = [*previous.items, *items], num_bytes + previous.num_bytes
        if not items:
            raise invalid("'input' is missing: there is nothing to answer.", "input")
        return cls(tenant, items, num_bytes)

    def keeper(self, stored: StoredResponses, response_id: str) -> Keep:
        """What stores the response at its end, with all that led to it."""

        def keep(response: dict[str, Any], output: Sequence[Item], num_scores: int) -> None:
            if not stored.is_open:
                response["store"] = False
                return
            made = list(map(_item_of, output))
            num_chars = sum(len(str(item)) for item in output)
            num_bytes = self.num_bytes + _STORED_BYTES + num_chars * _CHAR_BYTES
            num_bytes += num_scores * HELD_SCORE_BYTES
            whole = StoredResponse(response_id, self.tenant, response, [*self.items, *made], num_bytes)
            stored.add(whole, made)

        return keep


def _item_of(output: Item) -> InputItem:
    """An item of the reply as input; the model may have written arguments that no client may send."""
    if output["type"] != "function_call":
        return _ITEM.validate_python(output)
    return FunctionCallItem.model_construct(**{**output, "arguments": arguments_in(output["arguments"])})


def _forget(response: dict[str, Any], output: Sequence[Item], num_scores: int) -> None:
    """Of a response that its client does not want stored nothing is kept."""


def _resolved(item: InputItem, stored: StoredResponses, tenant: str | None) -> InputItem:
    if not isinstance(item, ReferenceItem):
        return item
    found = stored.item(item.id, tenant)
    if found is None:
        raise invalid(f"'input' refers to the item '{shown(item.id)}', which is not stored.", "input")
    return found


def _hold_references(request: Request, given: Sequence[InputItem], items: Sequence[InputItem]) -> int:
    """The bytes of what is referred to, held like a body's: a request may name one long item often.

    Raises ContextLengthExceeded before the texts are put together, and ApiError where there is no room.
    """
    pairs = zip(given, items, strict=True)
    num_chars = sum(text_length(item) for each, item in pairs if isinstance(each, ReferenceItem))
    if num_chars:
        engine, lease = context_of(request).engine, lease_of(request.scope)
        engine.tokenizer.check_length(num_chars, engine.info.max_model_len, "input")
        lease.hold(lease.num_bytes + num_chars * _CHAR_BYTES)
    return num_chars * _CHAR_BYTES


def _unread(body: ResponsesRequest) -> list[str]:
    """Known fields that nothing here follows."""
    verbosity = None if body.text is None else body.text.verbosity
    return [] if verbosity in (None, "medium") else ["text.verbosity"]


def _turn_body(body: ResponsesRequest, items: Sequence[InputItem], tools: ToolSet) -> ResponsesTurn:
    """The same request as a chat; every value in it was checked when the body was read."""
    functions, choice = choose(body, tools)
    return ResponsesTurn.model_construct(
        **body.extras(),
        model=body.model,
        messages=messages_of(items, body.instructions),
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        tools=functions or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(None if body.text is None else body.text.format),
        logprobs=body.includes_logprobs or None,
        top_logprobs=body.top_logprobs if body.includes_logprobs else None,
        service_tier=body.service_tier,
        user=body.user,
        safety_identifier=body.safety_identifier,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


def _response_format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    schema = None
    if form.type == "json_schema":
        schema = JsonSchemaFormat.model_construct(
            name=form.name or "output", json_schema=form.json_schema, strict=form.strict
        )
    return ResponseFormat.model_construct(type=form.type, json_schema=schema)
