"""A server on a real socket in the test's own event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from config import ServerSettings, Settings
from config.schema import ModelSettings
from engine import Engine
from server.app import build_app
from server.http.http_server import HttpServer
from server.http.listener import bind, url_of
from server.observability.request_log import Tracer
from tests.support.fake_engine import FakeEngine

MODEL = "test-model"
NOWHERE = Path(os.devnull, "home")


def make_settings(**server: Any) -> Settings:
    """The defaults on any free port, with the server's settings as given and nowhere to keep anything."""
    return Settings(
        home=NOWHERE,
        model=ModelSettings(served_model_name=(MODEL, "org/alias")),
        server=ServerSettings(port=0, **server),
    )


@asynccontextmanager
async def server_url(
    engine: FakeEngine | Engine, *, is_public: bool = False, **server: Any
) -> AsyncIterator[str]:
    """The URL of `engine` behind HTTP; on leaving, every request has ended and no task is left."""
    async with served(make_settings(**server), engine, is_public=is_public) as url:
        yield url


@asynccontextmanager
async def served(
    settings: Settings,
    engine: FakeEngine | Engine,
    tracer: Tracer | None = None,
    *,
    is_public: bool = False,
) -> AsyncIterator[str]:
    """The same with all of the settings as given, but for the port: any free one.

    With `is_public` it answers as if other machines could connect.
    """
    before = asyncio.all_tasks()
    listener = bind("127.0.0.1", 0)
    http = HttpServer(build_app(settings, cast(Engine, engine), tracer, is_public=is_public))
    http.config.load()
    http.lifespan = http.config.lifespan_class(http.config)
    await http.startup(sockets=[listener])
    try:
        yield url_of(listener)
    finally:
        await http.end_batches()
        await _close(http, listener)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=1)
    assert not [task for task in left if not task.done()]


async def _close(http: HttpServer, listener: socket.socket) -> None:
    """Shut down as the daemon does, but for uvicorn's pause of 0.1 s when all connections end at once."""
    for server in http.servers:
        server.close()
    for connection in list(http.server_state.connections):
        connection.shutdown()
    await asyncio.sleep(0)  # in this turn of the loop the closed ones learn of it
    if http.server_state.connections or http.server_state.tasks:
        await http.shutdown(sockets=[listener])
    listener.close()
