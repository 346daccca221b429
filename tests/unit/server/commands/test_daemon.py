"""The life of the process, with signals given by hand and an engine that loads, drains and dies on demand."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from engine import Engine, EngineDead, EngineError, EngineState, FormulaTerms, Overloaded, StartRefused
from server.api.batches.records import StoredBatch
from server.api.batches.store import BatchStore
from server.commands import daemon as daemon_module
from server.commands import serve
from server.commands.daemon import FAULT, OK, Daemon
from server.http.listener import bind, is_public, url_of
from tests.e2e.http_server import make_settings
from tests.e2e.wire import Wire, ask, events_of
from tests.support.fake_engine import FakeEngine


class LivingEngine(FakeEngine):
    """Loads when allowed to, and drains until the last stream is over."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(state=EngineState.LOADING, **fields)
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.loaded = asyncio.Event()
        self.may_generate = asyncio.Event()
        self.ended = asyncio.Event()
        self.gate = self._gate

    async def _gate(self, i: int) -> None:
        if i:
            waits = [asyncio.create_task(event.wait()) for event in (self.may_generate, self.ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def start(self) -> None:
        await self.may_load.wait()
        await super().start()
        self.loaded.set()

    async def drain(self, timeout_s: float) -> None:
        await super().drain(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(stream.over.wait() for stream in self.streams))
        except TimeoutError:
            self.end_all(Overloaded("The server is shutting down.", code="draining"))

    def end_all(self, error: EngineError) -> None:
        self.failure = error
        self.ended.set()


@dataclass
class Running:
    daemon: Daemon
    engine: LivingEngine
    url: str
    life: asyncio.Task[int]

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.life, 10)

    async def until_ready(self) -> None:
        await asyncio.wait_for(self.engine.loaded.wait(), 5)
        assert (await ask(self.url, "GET", "/health/ready")).status == 200


@asynccontextmanager
async def running(
    engine: LivingEngine, *, address: str = "127.0.0.1", **server: Any
) -> AsyncIterator[Running]:
    listener = bind(address, 0)
    daemon = Daemon(make_settings(**server), cast(Engine, engine), listener)
    life = asyncio.create_task(daemon.run())
    with listener:
        yield Running(daemon, engine, url_of(listener), life)
    if not life.done():
        life.cancel()
        await asyncio.wait({life})


async def test_it_answers_while_it_loads_and_drains_without_work() -> None:
    engine = LivingEngine()
    engine.may_load.clear()
    async with running(engine) as process:
        assert (await ask(process.url, "GET", "/health")).status == 200
        assert (await ask(process.url, "GET", "/health/ready")).json()["error"]["code"] == "loading"
        engine.may_load.set()
        await process.until_ready()
        process.daemon.on_signal()
        assert await process.exit_code() == OK
    assert engine.stopped


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", 403), ("0.0.0.0", 200)])
async def test_any_name_is_answered_where_other_machines_can_connect(address: str, status: int) -> None:
    async with running(LivingEngine(), address=address) as process:
        url = process.url.replace(address, "127.0.0.1")
        assert (await ask(url, "GET", "/version", None, {"host": "api.example"})).status == status
        process.daemon.on_signal()
        assert await process.exit_code() == OK


async def test_draining_lets_running_requests_finish_and_turns_others_away() -> None:
    engine = LivingEngine()
    async with running(engine) as process:
        await process.until_ready()
        wire = await Wire.connect(process.url)
        body = b'{"prompt":"abc","max_tokens":6,"temperature":0,"stream":true}'
        await wire.send("POST", "/v1/completions", body)
        await wire.head()
        first = await wire.chunk()
        process.daemon.on_signal()
        await asyncio.sleep(0.05)
        assert (await ask(process.url, "GET", "/health/ready")).json()["error"]["code"] == "draining"
        refused = await ask(process.url, "POST", "/v1/completions", {"prompt": "a"})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        engine.may_generate.set()
        events = events_of(first + b"".join(await wire.chunks()))
        assert "".join(event["choices"][0]["text"] for event in events) == "abcabc"
        await wire.close()
        assert await process.exit_code() == OK


async def test_a_drain_does_not_wait_for_a_batch_whose_files_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def list_slowly(*_: object) -> list[StoredBatch]:
        is_asked.set()
        may_answer.wait(20)
        return []

    monkeypatch.setattr(BatchStore, "list_batches", list_slowly)
    async with running(LivingEngine(), state_dir=tmp_path) as process:
        await process.until_ready()
        asking = asyncio.create_task(ask(process.url, "GET", "/v1/batches"))
        assert await asyncio.to_thread(is_asked.wait, 5)
        process.daemon.on_signal()
        await asyncio.sleep(0.05)
        ready = await ask(process.url, "GET", "/health/ready")
        may_answer.set()
        assert (ready.status, ready.json()["error"]["code"]) == (503, "draining")
        assert (await asking).status == 200
        assert await process.exit_code() == OK


async def test_a_second_signal_ends_streams_with_an_error_event() -> None:
    engine = LivingEngine()
    async with running(engine) as process:
        await process.until_ready()
        wire = await Wire.connect(process.url)
        await wire.send("POST", "/v1/completions", b'{"prompt":"abc","stream":true}')
        await wire.head()
        await wire.chunk()
        process.daemon.on_signal()
        await asyncio.sleep(0.05)
        process.daemon.on_signal()
        events = events_of(b"".join(await asyncio.wait_for(wire.chunks(), 5)))
        assert events[-1]["error"]["code"] == "draining"
        await wire.close()
        assert await process.exit_code() == FAULT


async def test_a_dead_engine_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    engine = LivingEngine()
    async with running(engine) as process:
        await process.until_ready()
        wire = await Wire.connect(process.url)
        await wire.send("POST", "/v1/completions", b'{"prompt":"abc","stream":true}')
        await wire.head()
        await wire.chunk()
        engine.state, engine.fault = EngineState.DEAD, EngineDead("The engine has stopped after a fault.")
        engine.end_all(engine.fault)
        engine.died.set()
        events = events_of(b"".join(await asyncio.wait_for(wire.chunks(), 5)))
        assert events[-1]["error"]["code"] == "engine_dead"
        await wire.close()
        for path in ("/health", "/ready"):  # the listener outlives the engine for a moment, to say so
            reply = await ask(process.url, "GET", path)
            assert (reply.status, reply.json()["error"]["code"]) == (503, "engine_dead")
        process.daemon.on_signal()
        assert await process.exit_code() == FAULT
    assert "the engine is dead" in caplog.text


async def test_the_last_line_says_what_drafts_gained_and_what_they_should_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = LivingEngine(draft_gauges=(4.0, 0.75, 1.5), formula=FormulaTerms(0.8, 4.0, 0.2))
    engine.metrics.busy_s = 1.0
    async with running(engine) as process:
        await process.until_ready()
        process.daemon.on_signal()
        assert await process.exit_code() == OK
    (told,) = (vars(each) for each in caplog.records if each.message == "since the first request")
    assert (told["draft_speedup"], told["draft_theoretical_speedup"]) == (1.5, 1.8676)


async def test_a_refused_start_says_why() -> None:
    async with running(LivingEngine(start_error=StartRefused("no such model"))) as process:
        with pytest.raises(StartRefused, match="no such model"):
            await process.exit_code()


async def test_a_start_that_breaks_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with running(LivingEngine(start_error=RuntimeError("boom"))) as process:
        assert await process.exit_code() == FAULT
    assert "could not be started" in caplog.text


async def test_a_signal_while_loading_does_not_wait_for_the_load() -> None:
    engine = LivingEngine()
    engine.may_load.clear()
    async with running(engine) as process:
        await ask(process.url, "GET", "/health")
        process.daemon.on_signal()
        assert await process.exit_code() == OK
    assert not engine.stopped  # its threads are busy loading and cannot be joined


async def test_a_drain_that_sticks_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class StuckEngine(LivingEngine):
        async def drain(self, timeout_s: float) -> None:
            await asyncio.get_running_loop().create_future()

        async def stop(self) -> None:
            await self.drain(0)

    monkeypatch.setattr(daemon_module, "GRACE_S", 0.05)
    async with running(StuckEngine(), drain_timeout=0.05) as process:
        await process.until_ready()
        process.daemon.on_signal()
        assert await process.exit_code() == FAULT


def test_a_port_in_use_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = make_settings()
        settings = settings.model_copy(update={"server": settings.server.model_copy(update={"port": port})})
        assert serve.run(settings) == serve.REFUSED
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"slipstream: --port {port}: already in use on 127.0.0.1. Choose another, or 0 for any free one."
    ]


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(StartRefused, match="no such address"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(StartRefused, match="--host 192"):
        bind("192.0.2.1", 0)


async def test_a_public_listener_without_a_key_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    for host, server, warned in (
        ("0.0.0.0", {}, 1),
        ("127.0.0.1", {}, 0),
        ("0.0.0.0", {"api_key": ("k",)}, 0),
    ):
        caplog.clear()
        with bind(host, 0) as listener:
            assert is_public(listener) == (host == "0.0.0.0")
            Daemon(make_settings(**server), cast(Engine, FakeEngine()), listener)._announce()
        assert caplog.text.count("asks for no key") == warned


def test_urls_are_what_a_client_types() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        listener = bind("::1", 0)
    except StartRefused:
        pytest.skip("no IPv6 here")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")
        assert not is_public(listener)
