"""The server over the real engine loop; only the model's forward pass is faked."""

from __future__ import annotations

import asyncio
import json
import random
import re

from tests.e2e.http_server import server_url
from tests.e2e.wire import Wire, ask, events_of
from tests.support.engines import running_engine
from tests.support.fakes import expected_output

PROMPT = [5, 6, 7, 8, 9]


async def test_tokens_text_and_counts_are_the_engine_s() -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        whole = (await ask(url, "POST", "/v1/completions", body)).json()
        events = events_of((await ask(url, "POST", "/v1/completions", {**body, "stream": True})).body)
        page = (await ask(url, "GET", "/metrics")).body.decode()
    choice = whole["choices"][0]
    assert choice["token_ids"] == expected_output(PROMPT, 20)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert whole["usage"]["total_tokens"] == 25
    assert whole["metrics"]["time_to_first_token_ms"] > 0
    assert 'slipstream_requests_total{finish_reason="length",model_name="test-model"} 2.0' in page
    assert 'slipstream_generation_tokens_total{model_name="test-model"} 40.0' in page


async def test_several_prompts_and_choices_are_each_their_own() -> None:
    body = {"prompt": [PROMPT, [9, 8]], "n": 3, "max_tokens": 9, "temperature": 0}
    async with running_engine() as harness, server_url(harness.engine) as url:
        whole = (await ask(url, "POST", "/v1/completions", body)).json()
        events = events_of((await ask(url, "POST", "/v1/completions", {**body, "stream": True})).body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [texts[0], texts[3]] * 3 == [texts[0], texts[3], texts[1], texts[4], texts[2], texts[5]]
    joined = [""] * 6
    for event in events:
        joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert joined == texts


async def test_a_chat_is_refused_for_its_messages_not_for_a_prompt() -> None:
    # The test tokenizer has words the fake model lacks: whatever is wrong with a chat is in its messages.
    async with running_engine() as harness, server_url(harness.engine) as url:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        reply = await ask(url, "POST", "/v1/chat/completions", body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "messages")


async def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    rng = random.Random(7)
    async with running_engine() as harness, server_url(harness.engine) as url:

        async def leave_after(num_reads: int, n: int, stream: bool) -> None:
            wire = await Wire.connect(url)
            body = {"prompt": PROMPT, "max_tokens": 120, "temperature": 0, "n": n, "stream": stream}
            await wire.send("POST", "/v1/completions", json.dumps(body).encode())
            if stream and num_reads:
                await wire.head()
                for _ in range(num_reads):
                    await wire.chunk()
            await wire.close()

        await asyncio.gather(
            *(leave_after(rng.randrange(6), rng.choice((1, 1, 3)), rng.random() < 0.7) for _ in range(40))
        )
        body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "return_token_ids": True}
        reply = await ask(url, "POST", "/v1/completions", body)
        assert reply.json()["choices"][0]["token_ids"] == expected_output(PROMPT, 10)
        metrics = harness.engine.metrics
        async with asyncio.timeout(5):
            while metrics.requests_started != sum(metrics.requests_finished.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert metrics.request_aborts["disconnect"] > 0


async def test_a_prompt_too_long_for_the_engine_is_refused_before_it_is_read() -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        for body in ({"prompt": "word " * 50_000}, {"prompt": [5] * 127, "max_tokens": 2}):
            reply = await ask(url, "POST", "/v1/completions", body)
            assert reply.json()["error"]["code"] == "context_length_exceeded"
        message = {"role": "user", "content": "word " * 50_000}
        reply = await ask(url, "POST", "/v1/chat/completions", {"messages": [message]})
        assert reply.json()["error"]["param"] == "messages"


async def test_several_prompts_of_which_the_last_is_too_long_start_nothing() -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        for last in ([5] * 200, [5] * 125, [999]):
            reply = await ask(url, "POST", "/v1/completions", {"prompt": [PROMPT, [9, 8], last], "n": 2})
            assert (reply.status, reply.json()["error"]["param"]) == (
                400,
                "max_tokens" if len(last) == 125 else "prompt",
            )
        page = (await ask(url, "GET", "/metrics")).body.decode()
        assert harness.engine.metrics.requests_started == 0
    counts = re.findall(r"^slipstream_request(?:s|_aborts)_total\{.*\} (.*)$", page, re.MULTILINE)
    assert set(counts) == {"0.0"}


async def test_draining_refuses_over_http() -> None:
    async with running_engine() as harness, server_url(harness.engine) as url:
        await harness.engine.drain(1)
        reply = await ask(url, "POST", "/v1/completions", {"prompt": "a"})
        assert (reply.status, reply.json()["error"]["code"]) == (503, "draining")
        assert (await ask(url, "GET", "/health")).status == 200
        assert (await ask(url, "GET", "/ready")).status == 503
