"""One line for each request, at its very end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine import DeadlineExceeded, Overloaded, RequestFailed, SpecStats
from tests.e2e.http_server import server_url
from tests.e2e.wire import Wire, ask
from tests.support.captured_log import CapturedLog, captured_log
from tests.support.engines import EngineShape, running_engine
from tests.support.fake_engine import FakeEngine

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = [5, 6, 7, 8, 9]


@asynccontextmanager
async def served(engine: FakeEngine, **server: Any) -> AsyncIterator[tuple[str, CapturedLog]]:
    with captured_log() as log:
        async with server_url(engine, **server) as url:
            yield url, log


def speculation() -> SpecStats:
    stats = SpecStats()
    stats.observe_round("ngram", 4, 3, 4)
    stats.observe_round("ngram", 4, 0, 1)
    return stats


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_line_with_all_that_was_measured(stream: bool) -> None:
    engine = FakeEngine(speculation=speculation())
    async with served(engine, api_key=("secret-key",)) as (url, log):
        headers = {
            "authorization": "Bearer secret-key",
            "x-request-id": "mine",
            "traceparent": f"00-{'ab' * 16}-{'12' * 8}-01",
        }
        body = {"model": "test-model", "prompt": "abcd", "max_tokens": 6, "stream": stream}
        reply = await ask(url, "POST", PATH, body, headers)
        (line,) = await log.requests()
    assert "secret-key" not in log.text
    assert len(line.pop("tenant")) == 16
    assert line.pop("reply_id") in reply.body.decode()
    assert 0 < line.pop("prepare_ms") < line.pop("ms")
    assert line.pop("timestamp") and line.pop("logger") == "slipstream.access"
    assert line == {
        "event": "request",
        "level": "info",
        "request_id": "mine",
        "route": PATH,
        "code": 200,
        "trace_id": "ab" * 16,
        "model": "test-model",
        "stream": stream,
        "choices": 1,
        "prompt_tokens": 4,
        "cached_tokens": 2,
        "completion_tokens": 6,
        "finish_reason": "length",
        "queue_ms": 1.0,
        "ttft_ms": 10.0,
        "generation_ms": 100.0,
        "preemptions": 0,
        "draft_tokens": 8,
        "accepted_tokens": 3,
        "acceptance": 0.375,
    }


async def test_choices_share_a_line_and_a_prompt() -> None:
    async with served(FakeEngine()) as (url, log):
        await ask(url, "POST", PATH, {"prompt": ["ab", "abc"], "n": 3, "max_tokens": 2})
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        await ask(url, "POST", CHAT, body)
        first, second = await log.requests(2)
    assert (first["choices"], first["prompt_tokens"], first["completion_tokens"]) == (6, 5, 12)
    assert (first["cached_tokens"], first["finish_reason"]) == (4, "length")
    assert (second["route"], second["completion_tokens"]) == (CHAT, 3)
    assert "trace_id" not in second
    assert "tenant" not in second
    assert "acceptance" not in second


async def test_refused_requests_are_told_with_the_reason() -> None:
    engine = FakeEngine()
    async with served(engine, api_key=("k",), max_body_bytes=1000) as (url, log):
        key = {"authorization": "Bearer k"}
        await ask(url, "POST", PATH, {"prompt": "a"})
        await ask(url, "POST", PATH, {"prompt": "a" * 2000}, key)
        await ask(url, "POST", PATH, {"prompt": "a" * 300}, key)
        await ask(url, "POST", CHAT, {"messages": 7}, key)
        await ask(url, "POST", PATH, {"prompt": "a", "model": "other"}, key)
        engine.refusal = Overloaded("full", code="queue_full")
        await ask(url, "POST", PATH, {"prompt": "a"}, key)
        lines = await log.requests(6)
    assert [(line["route"], line["code"], line["error"]) for line in lines] == [
        (PATH, 401, "invalid_api_key"),
        (PATH, 413, "body_too_large"),
        (PATH, 400, "context_length_exceeded"),
        (CHAT, 400, "invalid_request_error"),
        (PATH, 404, "model_not_found"),
        (PATH, 503, "queue_full"),
    ]
    assert all("prompt_tokens" not in line for line in lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_fault_is_told_whether_the_reply_had_begun_or_not(stream: bool, n: int) -> None:
    engine = FakeEngine(failure=RequestFailed("the logits hold NaN", "sampler"), fail_at=2)
    async with served(engine) as (url, log):
        await ask(url, "POST", PATH, {"prompt": "abc", "max_tokens": 5, "stream": stream, "n": n})
        (line,) = await log.requests()
    assert (line["code"], line["error"]) == (200 if stream else 500, "sampler_failed")
    assert "error" in line["finish_reason"].split(",")
    assert 2 <= line["completion_tokens"] <= 2 * n
    assert line["queue_ms"] == 1.0


async def test_a_deadline_is_an_end_of_its_own() -> None:
    engine = FakeEngine(failure=DeadlineExceeded("too late"))
    async with served(engine) as (url, log):
        await ask(url, "POST", PATH, {"prompt": "abc"})
        (line,) = await log.requests()
    assert (line["code"], line["error"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_is_told_of_when_its_work_has_ended(stream: bool, n: int) -> None:
    """With the tokens that were generated for it, read or not, and the times that made it give up."""
    with captured_log() as log:
        shape = EngineShape(max_model_len=4096, num_blocks=2048)
        async with running_engine(shape) as harness, server_url(harness.engine) as url:
            wire = await Wire.connect(url)
            body = {"prompt": PROMPT, "max_tokens": 4000, "temperature": 0, "stream": stream, "n": n}
            await wire.send("POST", PATH, json.dumps(body).encode())
            if stream:
                await wire.head()
                await wire.chunk()
            else:
                async with asyncio.timeout(10):
                    while harness.engine.metrics.generation_tokens < 5:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
            await wire.close()
            (line,) = await log.requests()
    assert (line["code"], line["finish_reason"]) == (499, "abort")
    assert 0 < line["completion_tokens"] < 4000 * n
    assert line["ttft_ms"] > 0
    assert "error" not in line


async def test_what_left_while_it_waited_did_not_wait_longer_than_it_lived() -> None:
    shape = EngineShape(max_model_len=4096, num_blocks=2048, max_num_seqs=1)
    with captured_log() as log:
        async with running_engine(shape) as harness, server_url(harness.engine) as url:
            body = json.dumps({"prompt": PROMPT, "max_tokens": 4000, "temperature": 0}).encode()
            running, waiting = await Wire.connect(url), await Wire.connect(url)
            for number, wire in enumerate((running, waiting), 1):
                await wire.send("POST", PATH, body)
                async with asyncio.timeout(10):
                    while harness.engine.metrics.requests_started < number:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
            await waiting.close()
            (line,) = await log.requests()
            await running.close()
            await log.requests(2)
    assert line["finish_reason"] == "abort"
    assert 0 < line["queue_ms"] <= line["ms"]


async def test_preemptions_are_counted() -> None:
    shape = EngineShape(num_blocks=12, max_num_seqs=4)
    with captured_log() as log:
        async with running_engine(shape) as harness, server_url(harness.engine) as url:
            body = {"prompt": PROMPT, "max_tokens": 25, "temperature": 0, "ignore_eos": True}
            await asyncio.gather(*(ask(url, "POST", PATH, body) for _ in range(4)))
            lines = await log.requests(4)
    assert sum(line["preemptions"] for line in lines) > 0


async def test_other_routes_are_told_of_when_they_fail_and_probes_and_scrapes_never() -> None:
    async with served(FakeEngine()) as (url, log):
        for path in ("/health", "/health/live", "/health/ready", "/ready", "/ping", "/metrics"):
            await ask(url, "GET", path)
        await ask(url, "GET", "/v1/models")
        await ask(url, "GET", "/v1/models/none")
        await ask(url, "GET", "/nowhere")
        await ask(url, "GET", "/health/live?x=1")
        await ask(url, "POST", PATH, {"prompt": "a", "max_tokens": 1})
        await log.requests()
    assert [(each["event"], each["route"], each["code"]) for each in log.records] == [
        ("access", "/v1/models/{model_id:path}", 404),
        ("access", "unmatched", 404),
        ("request", PATH, 200),
    ]


async def test_at_level_debug_other_routes_are_told_of_too() -> None:
    with captured_log(level="debug") as log:
        async with server_url(FakeEngine()) as url:
            await ask(url, "GET", "/v1/models")
            await ask(url, "GET", "/metrics")
            await ask(url, "POST", PATH, {"prompt": "a", "max_tokens": 1})
            await log.requests()
    assert [(each["level"], each["route"]) for each in log.records] == [
        ("debug", "/v1/models"),
        ("info", PATH),
    ]


async def test_a_level_above_info_silences_them() -> None:
    with captured_log() as log:
        logging.getLogger("slipstream").setLevel(logging.WARNING)
        async with server_url(FakeEngine()) as url:
            await ask(url, "POST", PATH, {"prompt": "a", "max_tokens": 1})
    assert log.lines == []
