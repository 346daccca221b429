"""The life of the process: bind, load, serve, drain, exit with the right code. Owns the signals.

SIGTERM and SIGINT drain; a second one ends at once. The listener stays open while draining, so that clients
read "draining" instead of a refused connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

from config import GivenFaults, PlannedFault, Settings, load_fault_plan
from engine import Engine, EngineState, StartRefused, build_engine, prepare_process, settle_memory
from server.app import build_app
from server.http_server import GRACE_S, HttpServer
from server.listener import bind, is_public, url_of

log = logging.getLogger("slipstream.server")

OK, FAULT, REFUSED = 0, 1, 2

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(settings: Settings) -> int:
    """Serve until a signal or a fault ends it; the exit code.

    0 drained, 1 a fault or a second signal, 2 the start was refused (one line on stderr).
    Ends the process itself when a thread is stuck in a step or a load that nothing can interrupt. Raises
    SettingsError for a fault plan that cannot be read.
    """
    given = load_fault_plan()
    _tell_of_faults(given)
    prepare_process()
    try:
        listener = bind(settings.server.host, settings.server.port)
        with listener:
            code = _run_loop(settings, given.faults, listener)
    except StartRefused as refusal:
        print(f"slipstream: {refusal}", file=sys.stderr)
        code = REFUSED
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    return code


def _tell_of_faults(given: GivenFaults) -> None:
    if given.is_ignored:
        log.warning("SLIPSTREAM_FAULT_PLAN is ignored: it is for tests, which set SLIPSTREAM_ALLOW_FAULTS=1")
    elif given.faults:
        points = ", ".join(sorted({fault.point for fault in given.faults}))
        log.warning("this server goes wrong on purpose, by SLIPSTREAM_FAULT_PLAN: %s", points)


def _run_loop(settings: Settings, faults: Sequence[PlannedFault], listener: socket.socket) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, faults, listener))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(settings: Settings, faults: Sequence[PlannedFault], listener: socket.socket) -> int:
    # Its own start and stop lines would say again what ours say.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    engine = build_engine(settings, faults)
    daemon = Daemon(settings, engine, listener)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, daemon.on_signal)
    try:
        return await daemon.run()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


class Daemon:
    """One engine behind one listener, from loading to the exit code."""

    def __init__(self, settings: Settings, engine: Engine, listener: socket.socket) -> None:
        self._settings = settings
        self._engine = engine
        self._listener = listener
        self._http = HttpServer(build_app(settings, engine))
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._loaded = False

    def on_signal(self) -> None:
        """The first asks for a drain, any later one for the end."""
        (self._second_signal if self._first_signal.is_set() else self._first_signal).set()

    async def run(self) -> int:
        """Serve to the end; the exit code. Raises StartRefused when the model cannot be loaded."""
        self._announce()
        life = asyncio.create_task(self._live())
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        asked = asyncio.create_task(self._first_signal.wait())
        try:
            await asyncio.wait({life, serving, asked}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                return self._end_of(life)
            if serving.done():
                log.error("the HTTP server ended by itself", exc_info=serving.exception())
                return FAULT
            return await self._drain(life)
        finally:
            await self._shut_down(life, serving)
            asked.cancel()

    def _announce(self) -> None:
        server, url = self._settings.server, url_of(self._listener)
        log.info("listening on %s while %s loads", url, self._settings.model.model)
        if is_public(self._listener) and not server.api_key and server.api_key_file is None:
            log.warning("%s is open to other machines and asks for no key: see --api-key", url)

    async def _live(self) -> None:
        """Load, then last until the engine dies."""
        await self._engine.start()
        self._loaded = True
        settle_memory()
        if self._engine.state is EngineState.READY:
            info = self._engine.info
            log.info(
                "serving %s on %s",
                self._settings.model.served_names[0],
                url_of(self._listener),
                extra={
                    "device": info.device,
                    "dtype": info.dtype,
                    "max_model_len": info.max_model_len,
                    "kv_blocks": f"{info.num_kv_blocks}x{info.kv_block_size}",
                    "kv_mib": info.kv_bytes >> 20,
                },
            )
        await self._engine.wait_dead()

    def _end_of(self, life: asyncio.Task[None]) -> int:
        """The exit code of a life that ended by itself. Raises StartRefused."""
        error = life.exception()
        if isinstance(error, StartRefused):
            raise error
        if error is not None:
            log.error("the engine could not be started", exc_info=error)
        else:
            log.error("the engine is dead; the process ends")
        return FAULT

    async def _drain(self, life: asyncio.Task[None]) -> int:
        """Let running requests finish; a second signal, a fault or a stuck step cuts that short."""
        timeout_s = self._settings.server.drain_timeout
        log.info("draining for up to %g s; another signal ends at once", timeout_s)
        draining = asyncio.create_task(self._engine.drain(timeout_s))
        hurried = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait(
            {draining, hurried, life}, timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        drained = draining.done() and not hurried.done() and self._engine.state is not EngineState.DEAD
        draining.cancel()
        hurried.cancel()
        log.info("drained" if drained else "ending with requests cut short")
        return OK if drained else FAULT

    async def _shut_down(self, life: asyncio.Task[None], serving: asyncio.Task[None]) -> None:
        """End every stream, give their readers a moment, close the listener."""
        if self._loaded or life.done():  # a load in progress cannot be stopped, only left behind
            await asyncio.wait({asyncio.create_task(self._engine.stop())}, timeout=GRACE_S)
        self._http.should_exit = True
        await asyncio.wait({serving}, timeout=2 * GRACE_S)
        life.cancel()
