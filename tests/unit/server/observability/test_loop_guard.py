"""The guard over a loop that turns, one that does not, and a process that was stopped."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time

from server.observability.loop_guard import LoopGuard

STUCK = """
import asyncio, logging, time
from server import serve
from server.observability.loop_guard import LoopGuard

async def main():
    serve._LAST_WORDS_S = 0.5
    LoopGuard(asyncio.get_running_loop(), 0.4, serve._end_stuck).start()
    await asyncio.sleep(0.6)  # turns, though nothing happens
    print("now", flush=True)
    if HOLDS_LOG:
        logging.getLogger().handlers[0].acquire()
    time.sleep(60)

logging.basicConfig(format="%(message)s %(stack)s")
asyncio.run(main())
"""


async def test_a_loop_that_hangs_ends_the_process_with_its_stack() -> None:
    def run(holds_log: bool) -> subprocess.CompletedProcess[str]:
        code = STUCK.replace("HOLDS_LOG", str(holds_log))
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    runs = await asyncio.gather(asyncio.to_thread(run, False), asyncio.to_thread(run, True))
    for done in runs:
        assert (done.returncode, done.stdout) == (1, "now\n")
        assert re.search('File "<string>", line 13,? in main', done.stderr)
    assert "the event loop hangs; the process ends" in runs[0].stderr


async def test_a_loop_that_turns_is_left_alone_and_stop_waits_for_nothing() -> None:
    stuck = threading.Event()
    guard = LoopGuard(asyncio.get_running_loop(), 0.4, stuck.set)
    guard.start()
    await asyncio.sleep(0.6)
    began = time.monotonic()
    guard.stop()
    assert time.monotonic() - began < 0.1
    assert not stuck.is_set()
    LoopGuard(asyncio.get_running_loop(), 0.4, stuck.set).stop()


async def test_a_pause_shorter_than_the_limit_is_no_hang() -> None:
    stuck = threading.Event()
    guard = LoopGuard(asyncio.get_running_loop(), 2.0, stuck.set)
    guard.start()
    await asyncio.sleep(0.55)
    time.sleep(0.6)  # noqa: ASYNC251 - that is what is tested
    await asyncio.sleep(0)
    guard.stop()
    assert not stuck.is_set()


async def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """Every wait takes, by the clock, far longer than it was to: as after a stop."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 100.0
        return now

    stuck = threading.Event()
    guard = LoopGuard(asyncio.get_running_loop(), 0.2, stuck.set, clock)
    guard.start()
    time.sleep(0.5)  # noqa: ASYNC251 - the loop does not turn
    guard.stop()
    assert not stuck.is_set()
