"""PATCH /server_info: what may change for all requests while the server runs, with the server's own key."""

from __future__ import annotations

import logging
from typing import Literal

from fastapi import APIRouter
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from engine import DraftingChange
from server.api.body import read_body
from server.api.openai.protocol_values import BodyPart, Positive
from server.api.openapi import json_body
from server.api.speculation import check_num_tokens
from server.http.context import context_of, exchange_of
from server.http.errors import PERMISSION, ApiError, ErrorReply, invalid
from server.http.json_reply import json_response
from server.observability.server_info import server_facts

log = logging.getLogger("slipstream.server")

router = APIRouter(tags=["server"])


class ServerSpeculation(BodyPart):
    """How all requests are drafted for from the next step on; what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    """False decodes all of them without drafts. The text is the same."""
    num_tokens: Positive | None = None
    """Most tokens to draft for a step of one request, up to what the server was started with."""
    length_policy: Literal["fixed", "threshold", "goodput"] | None = None
    """How the length of drafts is chosen for requests that do not say."""


class ServerPatch(BodyPart):
    """PATCH /server_info: what may change while the server runs."""

    model_config = ConfigDict(extra="forbid")

    speculation: ServerSpeculation
    """Drafting, which changes the speed and no token."""


@router.patch(
    "/server_info", openapi_extra=json_body(ServerPatch, {"speculation": {"length_policy": "goodput"}})
)
async def change_server(request: Request) -> Response:
    """Change it for all requests, from the next step on; then as GET. Of several keys only the first may."""
    if not exchange_of(request.scope).holds_server_key:
        message = "Only the server's own key may change this: the first of --api-key, else of its key file."
        raise ApiError(ErrorReply(403, PERMISSION, message, code="not_the_server_key"))
    patch = await read_body(request, lambda data, _: ServerPatch.model_validate(data))
    context, asked = context_of(request), patch.speculation
    change = DraftingChange(asked.enabled, asked.num_tokens, asked.length_policy)
    if change == DraftingChange():
        raise invalid("Nothing to change: give 'enabled', 'num_tokens' or 'length_policy'.", "speculation")
    check_num_tokens(asked.num_tokens, context.engine.info)
    context.engine.controls.change_drafting(change)
    return json_response(server_facts(context))
