"""More lives and ends of real processes, too long for the default suite: signals at any instant, stops."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command_line import QUIET, SLIPSTREAM
from tests.e2e.server_process import ServerProcess, server_process
from tests.e2e.test_life import (
    EXIT_S,
    FLAGS,
    PATH,
    SLOWLY,
    bind_again,
    body_of,
    code_of,
    error_of,
    events_left,
    open_stream,
)
from tests.e2e.wire import Wire, ask, events_of
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_INSTANTS = 50
AT_ONCE = 2  # servers
LONGEST_LOAD_S = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("life") / "model")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_at_once_with_error_events(model: Path, number: int) -> None:
    async with server_process(model, *FLAGS, faults=SLOWLY) as server:
        await server.until_ready()
        streams = [await open_stream(server.url, 240) for _ in range(3)]
        whole = asyncio.create_task(ask(server.url, "POST", PATH, body_of(240)))
        await asyncio.sleep(0.3)
        server.signal(number)
        await server.said("draining for")
        began = time.monotonic()
        server.signal(number)
        for stream in streams:
            assert (await events_left(stream, 1))[-1]["error"]["code"] == "draining"
        assert error_of(await asyncio.wait_for(whole, 1)) == (503, "draining")
        assert await server.exit_code(5) == 1
        assert time.monotonic() - began < 3
        bind_again(server.url)
        assert not server.other_lines


async def test_a_long_step_does_not_hold_up_the_end(model: Path) -> None:
    """A prefill that outlasts the drain: its request ends in the middle of it."""
    long = [{"point": "forward_sleep", "at": 5, "seconds": 30}]
    async with server_process(model, *FLAGS, "--drain-timeout", "1", faults=long) as server:
        await server.until_ready()
        stream = await open_stream(server.url, 100)
        whole = asyncio.create_task(ask(server.url, "POST", PATH, body_of(100)))
        await asyncio.sleep(1)
        began = time.monotonic()
        server.signal()
        assert (await events_left(stream, 3))[-1]["error"]["code"] == "draining"
        assert error_of(await asyncio.wait_for(whole, 3)) == (503, "draining")
        assert await server.exit_code(EXIT_S) == 0
        assert 1 <= time.monotonic() - began < 5


async def test_a_reader_that_does_not_read_does_not_hold_up_the_end(model: Path) -> None:
    async with server_process(model, *FLAGS, "--drain-timeout", "2") as server:
        await server.until_ready()
        wires = [await open_unread(server.url) for _ in range(3)]
        half = await Wire.connect(server.url)
        half.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
        await half.writer.drain()
        await asyncio.sleep(3)  # until all buffers between here and there are full
        began = time.monotonic()
        server.signal()
        assert await server.exit_code(EXIT_S) == 0
        assert time.monotonic() - began < 2 + 3
        for wire in (*wires, half):
            await wire.close()


async def open_unread(url: str) -> Wire:
    """A stream of more than any socket holds, of which nothing is read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
    wire = Wire(*await asyncio.open_connection(sock=sock, limit=4096))
    body = body_of(240, stream=True, n=16, logprobs=20, temperature=1)
    await wire.send("POST", PATH, json.dumps(body).encode())
    return wire


async def test_death_while_draining_is_a_fault(model: Path) -> None:
    faults = [*SLOWLY, {"point": "forward_raise", "at": 40, "count": -1}]
    async with server_process(model, *FLAGS, "--max-num-seqs", "1", faults=faults) as server:
        await server.until_ready()
        streams = [await open_stream(server.url, 200)]
        whole = [asyncio.create_task(ask(server.url, "POST", PATH, body_of(9))) for _ in range(4)]
        await asyncio.sleep(0.2)
        server.signal()
        for stream in streams:
            assert (await events_left(stream, 10))[-1]["error"]["code"] == "forward_failed"
        codes = [error_of(reply) for reply in await asyncio.wait_for(asyncio.gather(*whole), 5)]
        assert (503, "engine_dead") in codes
        assert await server.exit_code(EXIT_S) == 1


async def test_a_hang_while_it_drains_ends_in_time(model: Path) -> None:
    hang = [{"point": "forward_sleep", "at": 8, "seconds": 60}]
    flags = ("--watchdog-timeout", "1.5", "--drain-timeout", "30")
    async with server_process(model, *FLAGS, *flags, faults=hang) as server:
        await server.until_ready()
        stream = await open_stream(server.url, 200)
        server.signal()
        assert (await events_left(stream, 5))[-1]["error"]["code"] == "engine_hung"
        assert await server.exit_code(EXIT_S) == 1


async def test_a_stopped_process_that_goes_on_is_not_dead(model: Path) -> None:
    """The stop is longer than the watchdog allows, and falls into steps that take most of that themselves."""
    slowly = [{"point": "forward_sleep", "count": -1, "seconds": 1.0}]
    async with server_process(model, *FLAGS, "--watchdog-timeout", "2", faults=slowly) as server:
        await server.until_ready()
        stream = await open_stream(server.url, 9)
        for stopped_s in (3.0, 5.0):
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            server.signal(signal.SIGCONT)
            assert await code_of(server.url, "/health") == (200, None)
            await asyncio.sleep(0.7)
        assert (await events_left(stream, 20))[-1]["choices"][0]["finish_reason"] == "length"
        assert await code_of(server.url, "/health") == (200, None)
        server.signal()
        assert await server.exit_code(EXIT_S) == 0


async def test_a_saturated_server_is_healthy(model: Path) -> None:
    """Steps near the watchdog's limit, a full queue, and every probe answered with 200, soon."""
    slowly = [{"point": "forward_sleep", "count": -1, "seconds": 0.7}]
    flags = ("--watchdog-timeout", "1.5", "--max-num-seqs", "2", "--max-queued-requests", "20")
    async with server_process(model, *FLAGS, *flags, faults=slowly) as server:
        await server.until_ready()
        asks = [asyncio.create_task(ask(server.url, "POST", PATH, body_of(50))) for _ in range(60)]
        times: list[float] = []
        until = time.monotonic() + 15
        while time.monotonic() < until:
            began = time.monotonic()
            assert await code_of(server.url, "/health") == (200, None)
            times.append(time.monotonic() - began)
            await asyncio.sleep(0.05)
        times.sort()
        assert times[len(times) * 99 // 100] < 0.5
        for _ in range(2):
            server.signal()
            await asyncio.sleep(0.1)
        assert await server.exit_code(EXIT_S) == 1
        assert {(await each).status for each in asks} == {503}


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both", "reader"])
def test_closed_streams_change_nothing(model: Path, closed: str) -> None:
    """Standard streams closed at the start, or whose reader goes away later."""
    flags = ["serve", str(model), "--port", "0", *FLAGS]
    redirects = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-", "reader": ""}[closed]
    command = ["sh", "-c", f'exec "$@" {redirects}', "sh", *SLIPSTREAM, *flags]
    env = {**QUIET, "SLIPSTREAM_HOME": str(model.parent / "home")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        if closed == "reader":
            process.stdout.close()
            process.stderr.readline()
            process.stderr.close()
        time.sleep(1.5 * LONGEST_LOAD_S)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(EXIT_S) == 0


async def test_sigterm_at_any_instant_ends_well(model: Path) -> None:
    """In the load, in prefill and decode, in a drain: an exit code of 0 and a last event for every stream."""
    rng = random.Random(int(os.environ.get("SLIPSTREAM_TEST_SEED", "7")))
    turns = asyncio.Semaphore(AT_ONCE)

    async def live(is_loaded: bool, after_s: float, again_after_s: float | None) -> None:
        async with turns, server_process(model, *FLAGS, "--drain-timeout", "1", faults=SLOWLY) as server:
            clients = [asyncio.create_task(stream_through(server, seed)) for seed in range(4)]
            if is_loaded:
                await server.until_ready()
            await asyncio.sleep(after_s)
            server.signal()
            if again_after_s is not None:
                await asyncio.sleep(again_after_s)
                if server.process.returncode is None:
                    server.signal()
            code = await server.exit_code(EXIT_S)
            assert code in ((0,) if again_after_s is None else (0, 1)), (server.log, server.other_lines)
            await asyncio.wait_for(asyncio.gather(*clients), 5)
            bind_again(server.url)

    lives = []
    for number in range(NUM_INSTANTS):
        is_loaded = number % 2 == 0
        after_s = rng.uniform(0, 1.5 if is_loaded else LONGEST_LOAD_S)
        lives.append(live(is_loaded, after_s, rng.uniform(0, 1.2) if rng.random() < 0.3 else None))
    await asyncio.gather(*lives)


async def stream_through(server: ServerProcess, seed: int) -> None:
    """Ask for streams until the server is gone; each that begins must end in order."""
    while server.process.returncode is None:
        try:
            wire = await Wire.connect(server.url)
        except ConnectionError:
            return
        try:
            await wire.send("POST", PATH, json.dumps(body_of(30 + seed, stream=True)).encode())
            status, headers = await wire.head()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # nothing was accepted
        if status != 200:
            await wire.reader.readexactly(int(headers["content-length"]))
            await asyncio.sleep(0.2)
        else:
            last: Any = events_of(b"".join(await wire.chunks()))[-1]
            assert "error" in last or last["choices"][0]["finish_reason"] == "length"
        await wire.close()
