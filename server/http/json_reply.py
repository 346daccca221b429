"""JSON as it leaves the server: ASCII, compact, never NaN."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from starlette.responses import Response

from server.api.long_list import LongList


def _listed(value: object) -> list[object]:
    if isinstance(value, LongList | Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


# ASCII, so that no client can cut a character in two and no lone surrogate can fail to encode.
encode_json = json.JSONEncoder(
    ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=_listed
).encode


def json_response(
    payload: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON reply; unlike Starlette's own it can carry any text."""
    body = encode_json(payload).encode("ascii")
    return Response(body, status, headers, media_type="application/json")
