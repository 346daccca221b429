"""Ollama's paths, served with --ollama-api: chats, prompts, vectors, and what clients ask first."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import EncodedText
from server.api.body import read_fields, read_request
from server.api.embeddings.call import MANY_NUMBERS, TextsCall, of_length_one, open_call
from server.api.generation import Generation
from server.api.off_loop import off_loop
from server.api.ollama.conversation import chat_turn, text_turn
from server.api.ollama.models import (
    embedding_name,
    known_name,
    model_card,
    model_row,
    running_row,
    served_name,
)
from server.api.ollama.protocol import (
    ON_OLLAMA,
    OllamaBody,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from server.api.ollama.reply import OllamaShape
from server.api.openai.chat import open_chat_body
from server.api.openai.completions import open_completion_body
from server.api.openapi import json_body
from server.api.param_names import renamed_params
from server.api.time_limit import prepared_by
from server.api.turn_reply import respond
from server.http.body_room import lease_of
from server.http.context import ServerContext, context_of
from server.http.errors import invalid
from server.http.json_pieces import LargeJson
from server.http.json_reply import json_response
from server.http.sse import JSON_LINES

router = APIRouter(tags=["ollama"])

# Of the API that is spoken here: clients look at it before they use what an older Ollama did not have.
API_VERSION = "0.12.6"

_NAMES: Mapping[str, str] = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
}
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Name three rivers."}], "stream": False}


@router.post("/api/chat", openapi_extra=json_body(OllamaChatRequest, _CHAT_EXAMPLE))
async def chat(request: Request) -> Response:
    """Write the assistant's next message."""
    context = context_of(request)
    body = await read_request(request, OllamaChatRequest, ON_OLLAMA)
    model = served_name(context, body.model)
    shape, streams = shape_of(context, body, is_chat=True), body.streams
    if not body.messages:
        return loaded(context, shape)
    check_thinking(context, body)
    with renamed_params(_NAMES):
        turn = await off_loop(context, lease_of(request.scope).num_bytes, partial(chat_turn, body, model))
        del body  # what of it is large ends with the prompt
        generation = await open_chat_body(request, turn, _fresh_id())
    return await respond(context, generation, shape, streams=streams, framing=JSON_LINES)


@router.post(
    "/api/generate",
    openapi_extra=json_body(OllamaGenerateRequest, {"prompt": "Name three rivers.", "stream": False}),
)
async def generate(request: Request) -> Response:
    """Answer a prompt, continue it, or fill in what stands between it and a suffix."""
    context = context_of(request)
    body = await read_request(request, OllamaGenerateRequest, ON_OLLAMA)
    model = served_name(context, body.model)
    shape, streams = shape_of(context, body, is_chat=False), body.streams
    if not body.prompt and not body.suffix:
        return loaded(context, shape)
    with renamed_params(_NAMES):
        generation = await _open_generate(request, body, model)
    del body
    return await respond(context, generation, shape, streams=streams, framing=JSON_LINES)


async def _open_generate(request: Request, body: OllamaGenerateRequest, model: str) -> Generation:
    if body.raw or body.suffix:
        return await open_completion_body(request, text_turn(body, model), _fresh_id())
    check_thinking(context_of(request), body)
    return await open_chat_body(request, chat_turn(body, model), _fresh_id())


def shape_of(context: ServerContext, body: OllamaBody, *, is_chat: bool) -> OllamaShape:
    """What replies to `body`, by the name that it has for the model."""
    tells_metrics = context.settings.server.per_request_metrics
    return OllamaShape(body.model or context.served_names[0], is_chat, tells_metrics)


def loaded(context: ServerContext, shape: OllamaShape) -> Response:
    """The reply to a request that says nothing. Raises Overloaded before the model is loaded."""
    assert context.engine.info
    return json_response(shape.loaded())


def check_thinking(context: ServerContext, body: OllamaBody) -> None:
    """Raise ApiError where a model is to think that never does: clients ask again without it."""
    if body.think and context.engine.reply_format.reasoning is None:
        raise invalid(f'"{body.model or context.served_names[0]}" does not support thinking', "think")


@router.post("/api/embed", openapi_extra=json_body(OllamaEmbedRequest, {"input": "Three rivers."}))
async def embed(request: Request) -> Response:
    """A vector of each text, of length 1."""
    async with open_call(request, OllamaEmbedRequest, embedding_name) as (call, body):
        call.check_vectors(body.dimensions)
        if body.truncate is not False and call.most is None:
            call = replace(call, most=call.service.info.max_model_len)
        texts, vectors = await _vectors(call, body.input, "input", body.dimensions)
        ns = round(call.exchange.age_s * 1e9)
        told = {"total_duration": ns, "load_duration": 0, "prompt_eval_count": sum(map(len, texts))}
        rows = (of_length_one(vector[None])[0].tolist() for vector in vectors)
        reply = {"model": body.model or call.model, "embeddings": rows, **told}
        if vectors.size <= MANY_NUMBERS:
            return json_response(reply)
        return LargeJson(reply, call.context.large_replies)


@router.post("/api/embeddings", openapi_extra=json_body(OllamaEmbeddingsRequest, {"prompt": "A river."}))
async def embed_one(request: Request) -> Response:
    """The vector of one text, as the model gives it."""
    async with open_call(request, OllamaEmbeddingsRequest, embedding_name) as (call, body):
        call.check_vectors(None)
        call = replace(call, most=call.service.info.max_model_len)
        _, vectors = await _vectors(call, [body.prompt], "prompt", None)
        return json_response({"embedding": vectors[0].tolist()})


async def _vectors(
    call: TextsCall, texts: Sequence[str], param: str, width: int | None
) -> tuple[list[EncodedText], np.ndarray]:
    async with prepared_by(call.context.engine, call.deadline, call.exchange.arrival_time):
        encoded = await call.encode(texts, param)
    return encoded, await call.vectors(encoded, width)


@router.get("/api/tags")
async def list_tags(request: Request) -> Response:
    """Every name that a model answers to."""
    context = context_of(request)
    names = (*context.generator_names, *context.embedding_names)
    return json_response({"models": [model_row(context, name) for name in names]})


@router.get("/api/ps")
async def list_running(request: Request) -> Response:
    """The same, once the model is loaded."""
    context = context_of(request)
    names = () if context.info is None else context.served_names
    return json_response({"models": [running_row(context, name) for name in names]})


@router.post("/api/show", openapi_extra=json_body(OllamaShowRequest, {}))
async def show_model(request: Request) -> Response:
    """What the model can do, its chat template, and how long its context is."""
    context = context_of(request)
    body = await read_fields(request, OllamaShowRequest, {})
    return json_response(model_card(context, known_name(context, body.model or body.name)))


@router.get("/api/version")
async def show_api_version() -> Response:
    """The version of Ollama whose API this is."""
    return json_response({"version": API_VERSION})


def _fresh_id() -> str:
    return f"ollama-{uuid.uuid4().hex}"
