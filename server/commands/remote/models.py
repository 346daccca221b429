"""Which model to ask for when none is named."""

from __future__ import annotations

import json

from server.commands.remote.address import Address
from server.commands.remote.failures import BrokenReply, Refused
from server.commands.remote.http_client import HttpClient


async def first_model(client: HttpClient, address: Address) -> str:
    """The first model that the server lists. Raises RemoteError."""
    reply = await client.fetch("GET", f"{address.base}/models")
    if reply.status != 200:
        raise Refused(reply.status, reply.headers, bytes(reply.body))
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BrokenReply(
            "no model list", f"{address.url}/models lists no model; give one with --model"
        ) from None
