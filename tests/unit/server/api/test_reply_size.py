"""What a reply may come to is known, and refused, before any work: choices by positions by alternatives."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.openai.protocol import CompletionRequest
from server.api.reply_size import MAX_REPLY_BYTES, ReplyPart, reply_size
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support.fake_engine import FakeEngine

CONTEXT = 8192
LONG = "a" * 7800
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": LONG, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
        (COMPLETIONS, {"prompt": [LONG] * 128, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 8000}, "logprobs"),
        (CHAT, chat(n=128, logprobs=True, top_logprobs=20, max_tokens=300), "top_logprobs"),
        (CHAT, chat(n=8, logprobs=True, top_logprobs=20, messages=[{"role": "user", "content": "a"}],
                    max_tokens=None), "top_logprobs"),
    ],
)  # fmt: skip
async def test_a_reply_beyond_the_limit_is_a_400_that_names_it(
    path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    engine = FakeEngine(max_model_len=CONTEXT)
    async with server_url(engine) as url:
        reply = await ask(url, "POST", path, {**body, "stream": stream})
    assert reply.status == 400, reply.body[:200]
    error = reply.json()["error"]
    assert error["param"] == param
    assert str(MAX_REPLY_BYTES) in error["message"]
    assert engine.requests == []


async def test_the_prompt_of_a_chat_is_told_once_unless_it_is_streamed() -> None:
    body = chat(n=128, prompt_logprobs=0, messages=[{"role": "user", "content": "a" * 7000}])
    async with server_url(FakeEngine(max_model_len=CONTEXT)) as url:
        assert (await ask(url, "POST", CHAT, body)).status == 200
        assert (await ask(url, "POST", CHAT, body | {"stream": True})).status == 400


def test_an_echo_and_ids_count_as_well() -> None:
    body = CompletionRequest(prompt=[""], n=100, echo=True, return_token_ids=True, return_token_origins=True)
    size = reply_size(body, [ReplyPart(8000, "é" * 8000, 100, 16)])
    assert size.by_field == {
        "prompt_logprobs": 0,
        "logprobs": 0,
        "echo": 100 * 8000 * 12,
        "return_token_ids": 100 * 8016 * 8,
        "return_token_origins": 100 * 16 * 9,
    }
    assert size.held_bytes == 0


async def test_what_people_ask_for_is_served() -> None:
    """The longest prompt with all its scores, several choices with theirs, a batch of an evaluation."""
    bodies = [
        {"prompt": LONG, "prompt_logprobs": 20, "n": 4, "max_tokens": 1},
        {"prompt": ["a" * 1000] * 32, "echo": True, "logprobs": 5, "max_tokens": 1},
        {"prompt": "a", "n": 8, "logprobs": 5, "max_tokens": 500},
    ]
    async with server_url(FakeEngine(max_model_len=CONTEXT)) as url:
        for body in bodies:
            assert (await ask(url, "POST", COMPLETIONS, body)).status == 200
