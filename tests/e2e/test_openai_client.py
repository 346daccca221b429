"""The official client, pointed at this server by its base URL and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from engine import RequestFailed
from tests.e2e.http_server import MODEL, server_url
from tests.support.fake_engine import FakeEngine

HELLO: list[Any] = [{"role": "user", "content": "hi 🦀"}]
TEXT = "<user>hi 🦀"


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


async def test_async_chat_and_completions() -> None:
    async with server_url(FakeEngine()) as url, async_client(url) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=10, temperature=0, n=2, logprobs=True, top_logprobs=1
        )
        assert [choice.message.content for choice in chat.choices] == [TEXT] * 2
        assert chat.choices[1].finish_reason == "length"
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "<"
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (10, 20)
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 2
        completion = await client.completions.create(model=MODEL, prompt="ab", temperature=0, logprobs=1)
        assert completion.choices[0].text == "ab" * 8
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.tokens == ["a", "b"] * 8
        assert [model.id async for model in client.models.list()] == [MODEL, "org/alias"]
        assert (await client.models.retrieve("org/alias")).id == "org/alias"


async def test_async_streams() -> None:
    async with server_url(FakeEngine()) as url, async_client(url) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == TEXT
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 20
        parts = await client.completions.create(model=MODEL, prompt="ab", stream=True, temperature=0)
        assert "".join([part.choices[0].text async for part in parts]) == "ab" * 8


async def test_the_blocking_client_in_a_thread() -> None:
    def use(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, temperature=0)
            stream = client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=10, temperature=0, stream=True
            )
            joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content or "", joined

    async with server_url(FakeEngine(), api_key=("key",)) as url:
        assert await asyncio.to_thread(use, url) == (TEXT, TEXT)


async def test_errors_arrive_as_the_clients_own() -> None:
    async with server_url(FakeEngine()) as url, async_client(url) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.completions.create(model="nope", prompt="a")
        assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
        assert not_found.value.request_id
        with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
            await client.completions.create(model=MODEL, prompt="a" * 500)
        assert too_long.value.code == "context_length_exceeded"
    async with server_url(FakeEngine(), api_key=("key",)) as url, async_client(url) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_an_error_in_a_stream_is_raised() -> None:
    engine = FakeEngine(failure=RequestFailed("it broke", "forward"), fail_at=3)
    async with server_url(engine) as url, async_client(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass


async def test_closing_a_stream_ends_the_request() -> None:
    engine = FakeEngine(max_model_len=1_000_000)
    async with server_url(engine) as url, async_client(url) as client:
        stream = await client.completions.create(model=MODEL, prompt="ab", max_tokens=900_000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(engine.streams[0].closed.wait(), 2)
