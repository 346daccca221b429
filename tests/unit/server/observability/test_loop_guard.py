"""The guard over a loop that turns, one that does not, and a process that was stopped."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time

import pytest

from server.observability.loop_guard import GuardClocks, LoopGuard

STUCK = """
import asyncio, logging, time
from server.commands import serve
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


HOLDING = """
import asyncio, ctypes, os
from server.observability.loop_guard import LoopGuard

async def main():
    guard = LoopGuard(asyncio.get_running_loop(), 0.4, lambda: os._exit(3))
    guard.start()
    await asyncio.sleep(0.6)
    ctypes.PyDLL(None).usleep(1_300_000)  # which lets no other thread run
    await asyncio.sleep(0.6)
    guard.stop()

asyncio.run(main())
"""


async def test_a_call_that_holds_the_interpreter_is_told_of_while_it_lasts() -> None:
    """As an encoder or a parser does; the guard's own thread cannot run then."""
    run = [sys.executable, "-c", HOLDING]
    done = await asyncio.to_thread(subprocess.run, run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0  # it goes on, for it came back
    assert done.stderr.count("Timeout (0:00:00.5") in (2, 3)
    assert re.search('File "<string>", line 9 in main', done.stderr)


async def test_and_afterwards_how_long_it_was(caplog: pytest.LogCaptureFixture) -> None:
    now = computed = 0.0

    def wall() -> float:
        nonlocal now
        now += 50.0
        return now

    def work() -> float:
        nonlocal computed
        computed += 40.0
        return computed

    for clocks, told in ((GuardClocks(wall, work), True), (GuardClocks(wall, lambda: 0.0), False)):
        caplog.clear()
        guard = LoopGuard(asyncio.get_running_loop(), 0.2, lambda: None, clocks)
        guard.start()
        await asyncio.sleep(0.12)
        guard.stop()
        assert ("one call held the interpreter for 50.0 s" in caplog.text) == told


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
    guard = LoopGuard(asyncio.get_running_loop(), 0.2, stuck.set, GuardClocks(wall=clock))
    guard.start()
    time.sleep(0.5)  # noqa: ASYNC251 - the loop does not turn
    guard.stop()
    assert not stuck.is_set()
