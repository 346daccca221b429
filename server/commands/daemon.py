"""Daemon: one engine behind one listener, from loading to the exit code. The signals come from outside.

The listener stays open while draining, so that clients read "draining" instead of a refused connection, and
for a moment after a fault, so that they and their probes read of that.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from config import Settings
from engine import Engine, EngineState, StartRefused, freeze_heap
from server.http.listener import GRACE_S, is_public, url_of
from server.observability.logs import adopt_library_loggers
from server.observability.terminal_rows import report_rows, start_rows

if TYPE_CHECKING:
    from server.http.http_server import HttpServer
    from server.observability.request_log import Tracer

log = logging.getLogger("slipstream.server")

OK, FAULT = 0, 1

FAREWELL_S = 3.0  # longer than most probes' period, and far below the time a dead process may take to end


class Daemon:
    """Loads, serves, drains, ends. For the event-loop thread; `run` once. Calls `on_loaded` when it is."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        listener: socket.socket,
        tracer: Tracer | None = None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._on_loaded = on_loaded
        self._engine = engine
        self._listener = listener
        self._tracer = tracer
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
        await asyncio.sleep(0)  # loading begins, on a thread of its own
        self._http = self._make_http()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        asked = asyncio.create_task(self._first_signal.wait())
        try:
            await asyncio.wait({life, serving, asked}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                self._tell_end_of(life)
                if self._loaded:
                    await asyncio.wait({asked, serving}, timeout=FAREWELL_S)
                return FAULT
            if serving.done():
                log.error("the HTTP server ended by itself", exc_info=serving.exception())
                return FAULT
            return await self._drain(life)
        finally:
            await self._shut_down(life, serving)
            asked.cancel()

    def _make_http(self) -> HttpServer:
        # Only now: to import the APIs takes half a second, for which loading need not wait.
        from server.app import build_app
        from server.http.http_server import HttpServer

        adopt_library_loggers()
        app = build_app(self._settings, self._engine, self._tracer, is_public=is_public(self._listener))
        return HttpServer(app)

    def _announce(self) -> None:
        server, url, model = self._settings.server, url_of(self._listener), self._settings.model.model
        log.info("listening on %s while %s loads", url, model, extra={"rows": lambda: [f"loading {model}"]})
        if is_public(self._listener) and not server.api_key and server.api_key_file is None:
            log.warning("%s is open to other machines and asks for no key: see --api-key", url)

    async def _live(self) -> None:
        """Load, then last until the engine dies."""
        began = time.monotonic()
        await self._engine.start()
        self._loaded = True
        freeze_heap()
        self._on_loaded()
        if self._engine.state is EngineState.READY:
            self._tell_ready(time.monotonic() - began)
        await self._engine.wait_dead()

    def _tell_ready(self, seconds: float) -> None:
        url = url_of(self._listener)
        if not self._engine.generates:
            self._tell_embeddings_ready(url, seconds)
            return
        info = self._engine.info
        name = self._settings.model.served_names[0]
        derived = {size: why for size, why in info.size_origins.items() if why.startswith("derived")}
        log.info(
            "serving %s on %s",
            name,
            url,
            extra={
                "device": info.device,
                "dtype": info.dtype,
                "weight_mib": {form: size >> 20 for form, size in info.weight_bytes.items()},
                "kv_dtype": info.kv_dtype,
                "kernels": info.kernels,
                "compute_threads": info.compute_threads,
                "max_model_len": info.max_model_len,
                "kv_blocks": f"{info.num_kv_blocks}x{info.kv_block_size}",
                "kv_mib": info.kv_bytes >> 20,
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                **({"size_origins": derived} if derived else {}),
                "rows": lambda: start_rows(name, url, info, seconds),
            },
        )

    def _tell_embeddings_ready(self, url: str, seconds: float) -> None:
        """The same of an embedding model that is served alone."""
        name = self._settings.model.served_names[0]
        rows = {"rows": lambda: [f"{name} is ready at {url}/v1/embeddings, loaded in {seconds:.1f} s"]}
        log.info("serving embeddings of %s on %s", name, url, extra=rows)

    def _tell_of_work(self) -> None:
        """What the engine did, unless it did nothing."""
        metrics = self._engine.metrics
        done = metrics.since_first_step(self._engine.now())
        if metrics.busy_s:
            drafts, gauges = metrics.speculation, self._engine.gauges()
            figures: dict[str, object] = {
                **{"draft_tokens": drafts.num_proposed, "accepted_tokens": drafts.num_accepted},
                **{"draft_speedup": round(gauges.speculation_speedup, 4), **gauges.formula.figures()},
            }
            rows = {"rows": lambda: report_rows(done, drafts, gauges)}
            log.info("since the first request", extra={**done.figures(), **figures, **rows})

    def _tell_end_of(self, life: asyncio.Task[None]) -> None:
        """Log why a life ended by itself. Raises StartRefused."""
        error = life.exception()
        if isinstance(error, StartRefused):
            raise error
        if error is not None:
            log.error("the engine could not be started", exc_info=error)
        else:
            log.error("the engine is dead; the process ends")

    async def _drain(self, life: asyncio.Task[None]) -> int:
        """Let running requests finish; a second signal or a fault cuts that short. The exit code."""
        timeout_s = self._settings.server.drain_timeout
        log.info("draining for up to %g s; another signal ends at once", timeout_s)
        # Beside the drain: the files of a large batch may be being written, and nothing waits for a disk.
        ending = asyncio.create_task(self._http.end_batches())
        draining = asyncio.create_task(self._engine.drain(timeout_s))
        hurried = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait(
            {draining, hurried, life}, timeout=timeout_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        drained = draining.done() and not hurried.done() and self._engine.state is not EngineState.DEAD
        for task in (ending, draining, hurried):
            task.cancel()
        log.info("drained" if drained else "ending with requests cut short")
        return OK if drained else FAULT

    async def _shut_down(self, life: asyncio.Task[None], serving: asyncio.Task[None]) -> None:
        """End every stream, give their readers a moment, then the step in flight; what sticks is left."""
        await _wait(self._engine.drain(0))
        self._http.should_exit = True
        await asyncio.wait({serving}, timeout=2 * GRACE_S)
        if self._loaded or life.done():  # a load in progress cannot be stopped
            await _wait(self._engine.stop())
        life.cancel()
        self._tell_of_work()


async def _wait(ending: Coroutine[Any, Any, None]) -> None:
    """Give something that may stick a moment to end."""
    await asyncio.wait({asyncio.create_task(ending)}, timeout=GRACE_S)
