"""JSON as it leaves the server: ASCII, compact, never NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

# ASCII, so that no client can cut a character in two and no lone surrogate can fail to encode.
encode_json = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


def json_response(
    payload: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON reply; unlike Starlette's own it can carry any text."""
    body = encode_json(payload).encode("ascii")
    return Response(body, status, headers, media_type="application/json")
