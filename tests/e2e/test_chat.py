"""/v1/chat/completions over a real socket."""

from __future__ import annotations

from typing import Any

from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_json_reply_has_every_field() -> None:
    async with server_url(FakeEngine()) as url:
        body = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 8, "temperature": 0}
        found = (await ask(url, "POST", PATH, body)).json()
    assert found.pop("id").startswith("chatcmpl-")
    assert found.pop("created") > 1_700_000_000
    assert found.pop("metrics")["num_preemptions"] == 0
    assert found.pop("usage")["total_tokens"] == 16
    assert found == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "<user>hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
    }


async def test_messages_reach_the_template_as_plain_text() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "42", "tool_call_id": "call-1"},
    ]
    async with server_url(engine) as url:
        assert (await ask(url, "POST", PATH, {"messages": messages})).status == 200
    assert engine.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "call-1"},
    ]


async def test_no_limit_means_all_that_the_context_leaves() -> None:
    engine = FakeEngine(max_model_len=20)
    async with server_url(engine) as url:
        found = (await ask(url, "POST", PATH, {"messages": HELLO})).json()
        both = {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 5}
        assert (await ask(url, "POST", PATH, both)).json()["usage"]["completion_tokens"] == 5
    assert found["usage"]["completion_tokens"] == 12


async def test_the_role_comes_with_the_first_token_of_each_choice() -> None:
    body = {"messages": HELLO, "n": 2, "max_tokens": 2, "temperature": 0, "stream": True}
    async with server_url(FakeEngine()) as url:
        events = events_of((await ask(url, "POST", PATH, body)).body)
    for index in (0, 1):
        deltas = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [each["delta"] for each in deltas] == [
            {"role": "assistant", "content": ""},
            {"content": "<"},
            {"content": "u"},
            {},
        ]
        assert [each["finish_reason"] for each in deltas] == [None, None, None, "length"]


async def test_logprobs_are_records() -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 2, "temperature": 0}
    async with server_url(FakeEngine()) as url:
        content = (await ask(url, "POST", PATH, body)).json()["choices"][0]["logprobs"]["content"]
        events = events_of((await ask(url, "POST", PATH, {**body, "stream": True})).body)
    assert content[0] == {
        "token": "<",
        "logprob": -0.5,
        "bytes": [60],
        "top_logprobs": [
            {"token": "<", "logprob": -0.5, "bytes": [60]},
            {"token": "=", "logprob": -1.5, "bytes": [61]},
        ],
    }
    streamed = [e["choices"][0]["logprobs"] for e in events]
    assert [entry for each in streamed if each for entry in each["content"]] == content


async def test_token_ids_come_when_asked_for() -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    prompt = [ord(char) for char in "<user>hi"]
    async with server_url(FakeEngine()) as url:
        found = (await ask(url, "POST", PATH, body)).json()
        events = events_of((await ask(url, "POST", PATH, {**body, "stream": True})).body)
    assert found["prompt_token_ids"] == prompt
    assert found["choices"][0]["token_ids"] == prompt[:2]
    assert events[0]["prompt_token_ids"] == prompt
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == prompt[:2]


async def test_harmless_values_of_missing_features_pass() -> None:
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "speculation": {"enabled": False},
        "add_special_tokens": False,
        "user": "ann",
        "metadata": {"a": "b"},
        "store": True,
        "safety_identifier": "x",
        "prompt_cache_key": "y",
    }
    async with server_url(FakeEngine(), strict_params=True) as url:
        reply = await ask(url, "POST", PATH, {"messages": HELLO, "max_tokens": 1, **harmless})
    assert reply.status == 200
    assert "x-slipstream-ignored" not in reply.headers
