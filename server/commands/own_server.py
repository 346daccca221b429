"""OwnServer: a server in a thread of this process, for this process alone."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from pydantic import SecretStr

from config import Settings
from engine import StartRefused, build_engine, check_start
from server.commands.daemon import Daemon
from server.commands.remote.address import Address
from server.http.listener import bind, listen

_END_S = 10.0  # streams end at once, a step in flight within a moment
_NOWHERE = Path(os.devnull, "state")  # no folder can be there


class OwnServer:
    """Loads what `settings` name and serves it on a free loopback port, to whoever has a key made up for it.

    `start` and `stop` are for one thread. `loop_factory` None takes asyncio's own.
    """

    def __init__(
        self, settings: Settings, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        key = secrets.token_urlsafe(24)
        server = settings.server.model_copy(
            update={
                **{"host": "127.0.0.1", "port": 0, "drain_timeout": 0.0},
                "state_dir": _NOWHERE,  # the batches that a server left open are not for this model
                **{"api_key": (SecretStr(key),), "api_key_file": None},
            }
        )
        self._settings = settings.model_copy(update={"server": server})
        self._key = key
        self._loop_factory = loop_factory
        self._first_news: Future[None] = Future()  # loaded, or why not
        self._daemon: Daemon | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="own-server", daemon=True)

    def start(self) -> Address:
        """Load, and return where it listens. Raises StartRefused; may be interrupted by Ctrl-C."""
        check_start(self._settings)
        self._listener = bind("127.0.0.1", 0, listens=False)
        listen(self._listener)
        self._thread.start()
        self._first_news.result()
        host, port = self._listener.getsockname()[:2]
        return Address("http", host, port, "/v1", self._key)

    def stop(self) -> None:
        """End every stream and the engine; what sticks, or still loads, is left to the end of the process."""
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._daemon is not None:
            self._loop.call_soon_threadsafe(self._daemon.on_signal)
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner, self._listener:
                runner.run(self._serve(self._listener))
        except BaseException as error:
            if self._first_news.done():
                raise
            self._first_news.set_exception(error)
        if not self._first_news.done():
            self._first_news.set_exception(StartRefused("The engine could not be started: see the log."))

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._daemon = Daemon(
            self._settings,
            build_engine(self._settings),
            listener,
            on_loaded=lambda: self._first_news.set_result(None),
        )
        await self._daemon.run()
