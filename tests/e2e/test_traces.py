"""Spans of requests: what they say, whose children they are, and that a server without them has none."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from config import TraceExport
from engine import Engine, Overloaded, RequestFailed, RequestTiming, SpecStats
from server.observability.trace_export import exported_traces
from server.observability.tracing import RequestTracer
from tests.e2e.http_server import MODEL, make_settings, served
from tests.e2e.otlp_collector import collector
from tests.e2e.wire import Wire, ask
from tests.support import fake_engine
from tests.support.captured_log import CapturedLog, captured_log
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_engine import FakeEngine

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7, 8, 9]
CALLER = {"traceparent": f"00-{'ab' * 16}-{'12' * 8}-01"}


@dataclass
class Traced:
    """A server whose spans are kept here."""

    url: str
    log: CapturedLog
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order of their ends: the request is behind its phases."""
        return list(self.exporter.get_finished_spans())


@asynccontextmanager
async def traced(engine: FakeEngine | Engine, **server: Any) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(MODEL, SimpleSpanProcessor(exporter))
    with captured_log() as log:
        async with served(make_settings(**server), engine, tracer) as url:
            yield Traced(url, log, exporter)
    tracer.close()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def span_ns(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


async def test_a_request_is_a_span_with_its_phases_below_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = SpecStats()
    stats.observe_round("ngram", 4, 3, 4)
    timing = RequestTiming(60.0, 60.009, 0.1, 0.005, ((60.05, "swap"),))  # from the arrival
    monkeypatch.setattr(fake_engine, "TIMING", timing)
    before_ns = time.time_ns()
    async with traced(FakeEngine(speculation=stats), api_key=("k",)) as server:
        body = {"prompt": "abcd", "max_tokens": 6, "temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["no"]}
        headers = {**CALLER, "tracestate": "x=1", "authorization": "Bearer k", "x-request-id": "mine"}
        reply = await ask(server.url, "POST", PATH, body, headers)
        (line,) = await server.log.requests()
        queue, prefill, decode, request = server.spans
    assert line["trace_id"] == "ab" * 16
    assert request.name == f"text_completion {MODEL}"
    assert request.kind is SpanKind.SERVER
    assert request.parent is not None
    assert f"{request.parent.span_id:x}" == "12" * 8
    assert request.status.status_code is StatusCode.UNSET
    assert {each.context.trace_id for each in server.spans} == {int("ab" * 16, 16)}
    assert attributes(request) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": reply.json()["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "slipstream.request.id": "mine",
        "slipstream.tenant": line["tenant"],
    }
    assert [each.name for each in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    for each in (queue, prefill, decode):
        assert each.parent is not None
        assert each.parent.span_id == request.context.span_id
    start_ns, end_ns = span_ns(request)
    assert before_ns - 10_000_000 < start_ns < end_ns <= time.time_ns()
    assert start_ns < span_ns(queue)[0]  # the text was read in between
    assert span_ns(queue)[1] - start_ns == 60_000_000_000
    assert [span_ns(each)[1] - span_ns(each)[0] for each in (prefill, decode)] == [9_000_000, 100_000_000]
    assert span_ns(queue)[1] == span_ns(prefill)[0]
    assert span_ns(prefill)[1] == span_ns(decode)[0]
    assert attributes(decode) == {
        "slipstream.choice.index": 0,
        "gen_ai.usage.output_tokens": 6,
        "slipstream.speculation.rounds": 1,
        "slipstream.speculation.draft_tokens": 4,
        "slipstream.speculation.accepted_tokens": 3,
        "slipstream.speculation.methods": ("ngram",),
    }
    (event,) = request.events
    assert (event.name, dict(event.attributes or {})["slipstream.preemption.mode"]) == ("preempted", "swap")
    assert event.timestamp == start_ns + 60_050_000_000


async def test_without_a_caller_it_begins_a_trace_of_its_own() -> None:
    async with traced(FakeEngine()) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "model": "org/alias", "n": 2, "max_tokens": 2}
        await ask(server.url, "POST", CHAT, body, {"traceparent": "nonsense"})
        (line,) = await server.log.requests()
        *phases, request = server.spans
    assert request.parent is None
    assert line["trace_id"] == f"{request.context.trace_id:032x}"
    assert request.name == "chat org/alias"
    assert attributes(request)["gen_ai.request.choice.count"] == 2
    assert [(each.name, attributes(each)["slipstream.choice.index"]) for each in phases] == [
        (name, index) for index in (0, 1) for name in ("queue", "prefill", "decode")
    ]


async def test_what_the_caller_does_not_sample_is_not_exported() -> None:
    async with traced(FakeEngine()) as server:
        header = {"traceparent": CALLER["traceparent"][:-1] + "0"}
        await ask(server.url, "POST", PATH, {"prompt": "a", "max_tokens": 1}, header)
        (line,) = await server.log.requests()
        assert server.spans == []
    assert line["trace_id"] == "ab" * 16


async def test_refusals_are_spans_and_only_the_servers_own_are_errors() -> None:
    engine = FakeEngine()
    async with traced(engine) as server:
        await ask(server.url, "POST", PATH, {"prompt": 7.5})
        engine.refusal = Overloaded("full", code="queue_full")
        await ask(server.url, "POST", CHAT, {"messages": [{"role": "user", "content": "x"}]})
        await ask(server.url, "GET", "/v1/models")
        await ask(server.url, "GET", "/metrics")
        await server.log.requests(2)
        wrong, full = server.spans
    assert (wrong.name, wrong.status.status_code) == (f"text_completion {MODEL}", StatusCode.UNSET)
    assert attributes(wrong)["error.type"] == "invalid_request_error"
    assert (full.status.status_code, full.status.description) == (StatusCode.ERROR, "queue_full")
    assert attributes(full)["http.response.status_code"] == 503


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_ours_is_an_error(stream: bool) -> None:
    engine = FakeEngine(failure=RequestFailed("NaN for this prompt", "sampler"), fail_at=2)
    async with traced(engine) as server:
        await ask(server.url, "POST", PATH, {"prompt": "abc", "stream": stream})
        await server.log.requests()
        *phases, request = server.spans
    assert [each.name for each in phases] == ["queue", "prefill", "decode"]
    assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, "sampler_failed")
    assert attributes(request)["error.type"] == "sampler_failed"
    assert attributes(request)["gen_ai.response.finish_reasons"] == ("error",)


async def test_a_client_that_left_is_no_error_of_ours() -> None:
    shape = EngineShape(max_model_len=4096, num_blocks=2048)
    async with running_engine(shape) as harness, traced(harness.engine) as server:
        wire = await Wire.connect(server.url)
        await wire.send("POST", PATH, b'{"prompt":[5,6,7],"max_tokens":4000,"stream":true}')
        await wire.head()
        await wire.chunk()
        await wire.close()
        (line,) = await server.log.requests()
        *phases, request = server.spans
    assert [each.name for each in phases] == ["queue", "prefill", "decode"]
    assert request.status.status_code is StatusCode.UNSET
    assert attributes(request)["http.response.status_code"] == 499
    assert attributes(request)["gen_ai.response.finish_reasons"] == ("abort",)
    assert attributes(request)["gen_ai.usage.output_tokens"] == line["completion_tokens"]


async def test_an_engines_preemptions_are_dated() -> None:
    shape = EngineShape(num_blocks=12, max_num_seqs=4)
    async with running_engine(shape) as harness, traced(harness.engine) as server:
        body = {"prompt": PROMPT, "max_tokens": 25, "temperature": 0, "ignore_eos": True}
        await asyncio.gather(*(ask(server.url, "POST", PATH, body) for _ in range(4)))
        lines = await server.log.requests(4)
        requests = [each for each in server.spans if each.kind is SpanKind.SERVER]
    events = [(each, event) for each in requests for event in each.events]
    assert len(events) == sum(line["preemptions"] for line in lines) > 0
    for each, event in events:
        start_ns, end_ns = span_ns(each)
        assert start_ns < event.timestamp < end_ns


async def test_fastapi_does_not_say_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody else has set a provider for the whole process, as in an instrumented parent."""
    everywhere = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(everywhere))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with traced(FakeEngine()) as server:
        await ask(server.url, "POST", PATH, {"prompt": "a", "max_tokens": 1})
        await server.log.requests()
        assert len(server.spans) == 4
    assert everywhere.get_finished_spans() == ()


# To a collector.


async def trace_one(name: str = "req") -> None:
    """Serve one request with what the environment asks for."""
    with exported_traces(TraceExport(wanted=True), MODEL) as tracer:
        async with served(make_settings(), FakeEngine(), tracer) as url:
            headers = {**CALLER, "x-request-id": name}
            await ask(url, "POST", PATH, {"prompt": "a", "max_tokens": 1}, headers)


async def test_spans_arrive_at_the_collector_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    with collector() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        await asyncio.to_thread(asyncio.run, trace_one("find-me"))
    ((path, body),) = got
    assert path == "/v1/traces"
    for text in (b"my-service", b"find-me", b"decode", b"text_completion", bytes.fromhex("ab" * 16)):
        assert text in body


async def test_a_dead_collector_costs_a_bounded_moment_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_TIMEOUT", "1"
    )  # for this process's other tests, not for the server
    monkeypatch.setattr("server.observability.tracing.CLOSE_S", 0.2)
    start = time.monotonic()
    with captured_log():
        await asyncio.to_thread(asyncio.run, trace_one())
    assert time.monotonic() - start < 5


def test_what_cannot_be_had_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "slipstream.server")
    with exported_traces(TraceExport(True, "OTEL_TRACES_EXPORTER names another"), MODEL) as tracer:
        assert tracer is None
    monkeypatch.delitem(sys.modules, "server.observability.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with exported_traces(TraceExport(True), MODEL) as tracer:
        assert tracer is None
    first, second = [record.getMessage() for record in caplog.records]
    assert first == "traces are not exported: OTEL_TRACES_EXPORTER names another"
    assert "opentelemetry.sdk.resources is not installed: run pip install '.[otel]'" in second


def test_a_server_without_traces_loads_nothing_for_them() -> None:
    code = (
        "import sys, server.commands.serve\n"
        "from config import TraceExport\n"
        "from server.observability.trace_export import exported_traces\n"
        "with exported_traces(TraceExport(False), 'm') as tracer: assert tracer is None\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
