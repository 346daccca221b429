"""uvicorn as this daemon runs it: which protocol, how long idle connections stay, whose signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI

from server.api.batches.batches import Batches
from server.http.connection import Connection, ConnectionHouse, ConnectionLimits
from server.http.connection_gate import ConnectionGate, room_for
from server.http.context import ServerContext
from server.http.listener import GRACE_S

KEEP_ALIVE_S = 75  # longer than clients' own pools keep a connection, so that the client closes first


class HttpServer(uvicorn.Server):
    """uvicorn with our connections and without its signal handlers: the daemon decides when it ends.

    `app` is what `build_app` made. May raise the process's limit on open files, for --max-connections.
    """

    def __init__(self, app: FastAPI) -> None:
        context: ServerContext = app.state.slipstream
        self._history = context.history
        self._batches: Batches = app.state.batches
        house = _house_for(context)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], partial(Connection, house)),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; keep figures for the status page and answer open batches meanwhile."""
        await super().startup(sockets)
        self._history.start()
        self._batches.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop all of it."""
        self._history.stop()
        await self._batches.stop()
        await super().shutdown(sockets)

    async def end_batches(self) -> None:
        """Let the lines of batches go at once: they run again after the next start. Safe to call twice."""
        await self._batches.stop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signals alone."""
        yield


def _house_for(context: ServerContext) -> ConnectionHouse:
    settings = context.settings.server
    limits = ConnectionLimits(settings.read_timeout, settings.stall_timeout, settings.max_header_bytes)
    return ConnectionHouse(limits, ConnectionGate(room_for(settings.max_connections)), context.http)
