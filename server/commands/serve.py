"""The life of the process: bind, run the daemon, exit with the right code. Owns the signals.

SIGTERM and SIGINT drain; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

from config import GivenFaults, PlannedFault, Settings, load_fault_plan, load_trace_export
from engine import StartRefused, build_engine, check_start, import_libraries, prepare_process, thread_stacks
from server.commands.daemon import FAULT, Daemon
from server.commands.event_loop import loop_factory
from server.commands.process_end import leave, leave_others
from server.http.listener import bind, listen
from server.observability.logs import adopt_library_loggers
from server.observability.loop_guard import LoopGuard
from server.observability.trace_export import exported_traces

if TYPE_CHECKING:
    from server.observability.request_log import Tracer

log = logging.getLogger("slipstream.server")

REFUSED = 2

_LAST_WORDS_S = 3.0
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
    threads = set(threading.enumerate())
    try:
        listener = bind(settings.server.host, settings.server.port, listens=False)
        with exported_traces(load_trace_export(), settings.model.served_names[0]) as tracer, listener:
            import_libraries()
            check_start(settings)
            adopt_library_loggers()  # of the libraries that this has imported
            listen(listener)
            code = _run_loop(lambda: _serve(settings, given.faults, listener, tracer))
    except StartRefused as refusal:
        print(f"slipstream: {refusal}", file=sys.stderr)
        code = REFUSED
    return leave_others(code, threads)


def _end_stuck() -> None:
    """The event loop is stuck: only the log can be reached."""
    faulthandler.dump_traceback_later(_LAST_WORDS_S, exit=True)  # what is stuck may hold the log as well
    log.critical("the event loop hangs; the process ends", extra={"stack": thread_stacks("")})
    leave(FAULT)


def _tell_of_faults(given: GivenFaults) -> None:
    if given.is_ignored:
        log.warning("SLIPSTREAM_FAULT_PLAN is ignored: it is for tests, which set SLIPSTREAM_ALLOW_FAULTS=1")
    elif given.faults:
        points = ", ".join(sorted({fault.point for fault in given.faults}))
        log.warning("this server goes wrong on purpose, by SLIPSTREAM_FAULT_PLAN: %s", points)


def _run_loop(serve: Callable[[], Coroutine[None, None, int]]) -> int:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(serve())


async def _serve(
    settings: Settings, faults: Sequence[PlannedFault], listener: socket.socket, tracer: Tracer | None
) -> int:
    engine = build_engine(settings, faults)
    loop = asyncio.get_running_loop()
    guard = LoopGuard(loop, settings.server.watchdog_timeout, _end_stuck)
    daemon = Daemon(settings, engine, listener, tracer, on_loaded=guard.start)
    for number in _SIGNALS:
        loop.add_signal_handler(number, daemon.on_signal)
    try:
        return await daemon.run()
    finally:
        guard.stop()
        # What comes from here on must change nothing, least of all the exit code.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
