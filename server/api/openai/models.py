"""GET /v1/models and /v1/models/{id}: the names under which models are served, and which does what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from engine import EmbedderInfo, EngineInfo
from server.http.context import ServerContext, context_of
from server.http.errors import invalid, model_not_found, shown
from server.http.json_reply import json_response

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name that a model answers to."""
    context = context_of(request)
    names = (*context.generator_names, *context.embedding_names)
    data = [model_object(context, name) for name in names]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{model_id:path}")
async def get_model(
    request: Request, model_id: Annotated[str, Path(description="A name that the model is served by.")]
) -> Response:
    """One of them; names may hold slashes."""
    context = context_of(request)
    if model_id not in (*context.generator_names, *context.embedding_names):
        raise model_not_found(model_id)
    return json_response(model_object(context, model_id))


def check_model(context: ServerContext, name: str | None) -> None:
    """Raise ApiError unless `name` is served and generates; None means the model that does.

    A 404 for a name that is not served, a 400 for an embedding model's.
    """
    if name in context.embedding_names or (name is None and not context.generator_names):
        model = shown(name or context.embedding_names[0])
        raise invalid(f"The model '{model}' generates no text: see /v1/embeddings and /v1/rerank.", "model")
    if name is not None and name not in context.generator_names:
        raise model_not_found(name)


def check_embedding_model(context: ServerContext, name: str | None) -> str:
    """The name of the embedding model or reranker asked for, None the one there is. Raises ApiError.

    A 404 for a name that is not served, a 400 for a generator's or where no such model is served.
    """
    names = context.embedding_names
    if name is not None and name not in (*names, *context.generator_names):
        raise model_not_found(name)
    if not names:
        raise invalid("No embedding model is served: start the server with --embedding-model.", "model")
    if name is not None and name not in names:
        raise invalid(f"The model '{shown(name)}' gives no embeddings: use '{shown(names[0])}'.", "model")
    return name or names[0]


def model_object(context: ServerContext, name: str) -> dict[str, object]:
    """OpenAI's model object; `max_model_len` is null until the model is loaded."""
    settings, root = context.settings.model, context.settings.model.model
    info: EngineInfo | EmbedderInfo | None = context.info
    if name in context.embedding_names:
        root = settings.embedding_model or root
        embeddings = context.embeddings
        info = embeddings.info if embeddings is not None and embeddings.is_loaded else None
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "slipstream",
        "root": root,
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
    }
