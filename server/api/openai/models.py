"""GET /v1/models and /v1/models/{id}: the names under which the one model is served."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from server.http.context import ServerContext, context_of
from server.http.errors import model_not_found
from server.http.json_reply import json_response

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name the model answers to."""
    context = context_of(request)
    data = [model_object(context, name) for name in context.served_names]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{model_id:path}")
async def get_model(
    request: Request, model_id: Annotated[str, Path(description="A name that the model is served by.")]
) -> Response:
    """One of them; names may hold slashes."""
    context = context_of(request)
    check_model(context, model_id)
    return json_response(model_object(context, model_id))


def check_model(context: ServerContext, name: str | None) -> None:
    """Raise ApiError (404) when `name` is not served; None means the one that is."""
    if name is not None and name not in context.served_names:
        raise model_not_found(name)


def model_object(context: ServerContext, name: str) -> dict[str, object]:
    """OpenAI's model object; `max_model_len` is null until the model is loaded."""
    info = context.info
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "slipstream",
        "root": context.settings.model.model,
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
    }
