"""build_app: one engine behind one ASGI application. No globals, no signals: any ASGI server can run it."""

from __future__ import annotations

import time

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from config import Settings
from engine import Engine, EngineError
from server.api import requests, server_changes
from server.api.anthropic import routes as anthropic
from server.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from server.api.batches import files
from server.api.batches import routes as batches
from server.api.batches.batches import Batches
from server.api.batches.protocol import BatchRequest
from server.api.embeddings import routes as embeddings
from server.api.embeddings.protocol import EmbeddingsRequest, RerankRequest, ScoreRequest
from server.api.llama_cpp import infill
from server.api.llama_cpp.protocol import InfillRequest
from server.api.next_turns import NextTurns
from server.api.ollama import routes as ollama
from server.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from server.api.openai import chat, completions, models, tokens
from server.api.openai.protocol import ChatCompletionRequest, CompletionRequest, RequestPatch
from server.api.openai.protocol_tokens import DetokenizeRequest, TokenizeRequest
from server.api.openapi import describe_bodies
from server.api.responses import routes as responses
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.store import StoredResponses
from server.api.server_changes import ServerPatch
from server.http.auth import AuthMiddleware, key_ring
from server.http.client import ClientMiddleware
from server.http.context import ServerContext
from server.http.errors import ApiError, answer_error
from server.http.head import HeadMiddleware
from server.http.middleware import ExchangeMiddleware
from server.http.open_tenants import OpenTenants
from server.http.site_guard import SiteGuard, allow_origins, rules_of
from server.http.turns import Turns
from server.http.unrouted import answer_unrouted
from server.observability import health, server_info
from server.observability.figure_history import FigureHistory
from server.observability.health import server_version
from server.observability.http_metrics import HttpMetrics
from server.observability.metrics import metrics_router
from server.observability.request_log import RequestLog, Tracer
from server.pages.api_page import api_page_router
from server.pages.status_page import status_router

BODIES = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    InfillRequest,
    TokenizeRequest,
    DetokenizeRequest,
    BatchRequest,
    RequestPatch,
    ServerPatch,
)
OLLAMA_BODIES = (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
    OllamaShowRequest,
)


def build_app(
    settings: Settings, engine: Engine, tracer: Tracer | None = None, *, is_public: bool = False
) -> FastAPI:
    """The application; the caller starts and stops `engine`, and closes `tracer`, None for no traces.

    `is_public` says that other machines may connect: it then answers to any name, unless --allowed-host gives
    some. Raises StartRefused for bad keys.
    """
    http, tenants = HttpMetrics(), OpenTenants()
    context = ServerContext(
        settings,
        engine,
        http,
        created=int(time.time()),
        history=FigureHistory(engine, http),
        responses=StoredResponses(settings.server.max_stored_responses),
        tenants=tenants,
        large_bodies=Turns(tenants.give_way),
        large_replies=Turns(tenants.give_way),
        next_turns=NextTurns(engine) if settings.scheduler.read_next_turn else None,
    )
    keys = key_ring(settings)
    app = FastAPI(
        title="Slipstream",
        version=server_version(),
        docs_url=None,  # theirs are drawn by scripts of another server
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        # Requests are traced by `tracer`; FastAPI's own spans would say it twice, with the client's URLs.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.slipstream = context
    app.state.batches = Batches.of(context, app)
    for part in (
        completions,
        infill,
        chat,
        responses,
        anthropic,
        embeddings,
        models,
        tokens,
        files,
        batches,
        requests,
        health,
        server_info,
        server_changes,
    ):
        app.include_router(part.router)
    app.include_router(metrics_router(context))
    app.include_router(status_router())
    app.include_router(api_page_router())
    if settings.server.ollama_api:
        app.include_router(ollama.router)
    for kind in (ApiError, EngineError, RequestValidationError):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(HTTPException, answer_unrouted)
    bodies = BODIES + OLLAMA_BODIES * settings.server.ollama_api
    describe_bodies(app, *bodies, asks_for_key=bool(keys))
    # The last added is the outermost: label and count, then sites, keys, body and leaving, HEAD.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(ClientMiddleware, settings=settings.server)
    protect_metrics = settings.server.protect_metrics
    app.add_middleware(
        AuthMiddleware,
        keys=keys,
        protect_metrics=protect_metrics,
        tenants=tenants,
        tenant_header=settings.scheduler.tenant_header,
    )
    if settings.server.cors_origin:
        allow_origins(app, settings.server.cors_origin)
    app.add_middleware(SiteGuard, rules=rules_of(settings.server, is_public))
    app.add_middleware(ExchangeMiddleware, context=context, request_log=RequestLog(tracer))
    return app
