"""What a request leaves behind: nothing for the garbage collector, and not twenty bytes in memory.

On the daemon's own event loop and with a blocking client in a thread: asyncio's transports leave cycles.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from engine.plan.metrics import batch_metrics
from server.api.batches.line_call import LineCaller
from server.app import build_app
from server.observability import figure_history
from tests.e2e.http_server import make_settings, server_url
from tests.support.engines import EngineShape, running_engine

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 110, "temperature": 0}
MAX_BYTES, LEAKED = 10.0, 20  # a request
HALF = 1000  # requests
SHAPE = EngineShape(prefix_caching=True)


def errands(number: int) -> Iterator[tuple[str, str, Any]]:
    """Requests of one client: whole, streamed, several choices, a refusal, an unknown path."""
    prompt = [5 + number % 7, 6, 7, 8]
    yield "POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    yield "POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 4, "seed": number, "stream": True}
    yield "POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 2, "temperature": 0, "n": 2}
    yield "POST", COMPLETIONS, {"prompt": [-1]}
    yield "GET", "/nowhere", None


def visit(url: str, num_requests: int) -> None:
    """So many requests, one after the other, five on a connection."""
    parts, num_sent, number = urlsplit(url), 0, 0
    while num_sent < num_requests:
        connection = HTTPConnection(str(parts.hostname), parts.port)
        for method, path, body in errands(number):
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"content-type": "application/json"})
            connection.getresponse().read()
            num_sent += 1
        connection.close()
        number += 1


def leave(url: str, body: Any) -> None:
    """Ask, and go before the answer ends."""
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    connection.getresponse().read(1)
    connection.close()


@contextmanager
def no_collection() -> Iterator[None]:
    """What is unreachable here stays for the collection at the end."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held() -> tuple[int, int]:
    """Bytes that Python's allocators gave, and objects that the collector knows."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], len(gc.get_objects())


async def serve(caller: LineCaller, num_requests: int, on_reply: Callable[[], None]) -> None:
    """So many requests to the application itself: timers and sockets would blur what is counted."""
    bodies = [body for number in range(7) for _, path, body in errands(number) if path == COMPLETIONS]
    for number in range(num_requests):
        body = {**bodies[number % len(bodies)], "user": f"user {number}"}
        await caller.ask(COMPLETIONS, json.dumps(body).encode(), "")
        on_reply()


async def growth_of(num_requests: int, on_reply: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Bytes and objects that a request adds, over the later half of twice so many."""
    async with running_engine(SHAPE) as harness:
        app = build_app(make_settings(), harness.engine)
        async with app.router.lifespan_context(app):
            caller = LineCaller(app, harness.engine.now)
            await serve(caller, num_requests, on_reply)  # what is filled once is filled
            tracemalloc.start()
            try:
                await serve(caller, num_requests, on_reply)
                before = held()
                await serve(caller, num_requests, on_reply)
                after = held()
            finally:
                tracemalloc.stop()
    return (after[0] - before[0]) / num_requests, (after[1] - before[1]) / num_requests


async def garbage_of(visitor: Callable[[str], None], num_visits: int) -> float:
    """Objects that a visit leaves for the collector."""
    async with running_engine(SHAPE) as harness, server_url(harness.engine) as url:

        async def visits(number: int) -> None:
            for _ in range(number):
                await asyncio.to_thread(visitor, url)
            while harness.engine.gauges().num_requests_running:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)  # the last connection has closed

        await visits(2)
        with no_collection():
            await visits(num_visits)
            return gc.collect() / num_visits


def test_requests_leave_nothing_for_the_collector() -> None:
    assert uvloop.run(garbage_of(lambda url: visit(url, 5), 10)) < 2  # a closed connection once left 44


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, "n": 3}])
def test_readers_that_leave_leave_nothing_for_the_collector(more: dict[str, Any]) -> None:
    assert uvloop.run(garbage_of(lambda url: leave(url, ENDLESS | more), 5)) < 2  # 97 with several choices


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures are kept of the last minutes, which fill up as time goes by."""
    monkeypatch.setattr(figure_history, "PERIOD_S", 3600.0)
    monkeypatch.setattr(batch_metrics, "_SNAPSHOT_S", 3600.0)


@pytest.mark.slow
@pytest.mark.usefixtures("timeless")
def test_memory_is_flat() -> None:
    num_bytes, num_objects = uvloop.run(growth_of(HALF))
    assert num_bytes < MAX_BYTES
    assert num_objects < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("timeless")
def test_twenty_bytes_a_request_are_seen() -> None:
    kept = bytearray()
    num_bytes, _ = uvloop.run(growth_of(HALF, lambda: kept.extend(bytes(LEAKED))))
    assert num_bytes > MAX_BYTES
