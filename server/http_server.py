"""uvicorn as this daemon runs it: which parser, how long idle connections stay, whose signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

KEEP_ALIVE_S = 75  # longer than clients' own pools keep a connection, so that the client closes first
GRACE_S = 2  # for last events to reach slow readers, and for the step in flight to end


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon decides when it ends."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signals alone."""
        yield
