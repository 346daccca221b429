"""What well-known clients send is taken as it is, and what they read of the answer is there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.wire import ask, events_of
from tests.support.client_bodies import BODIES, CHAT, COMPLETIONS, LM_EVAL_SCORES, LM_EVAL_TEXTS, ClientBody

pytestmark = pytest.mark.asyncio(loop_scope="module")


def text_of(choice: dict[str, Any]) -> str:
    """What a choice or a chunk's choice says."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent.client)
async def test_it_is_taken_as_it_is(url: str, sent: ClientBody) -> None:
    headers = {"authorization": "Bearer EMPTY", "x-request-id": "theirs-1"}
    reply = await ask(url, "POST", sent.path, sent.body, headers)
    assert reply.status == 200, reply.body
    assert reply.headers["x-request-id"] == "theirs-1"
    assert "x-slipstream-ignored" not in reply.headers
    if not sent.body.get("stream"):
        whole = reply.json()
        assert all(text_of(choice) and choice["finish_reason"] for choice in whole["choices"])
        assert whole["usage"]["completion_tokens"] > 0
        return
    events = events_of(reply.body)
    chunks = [event["choices"][0] for event in events if event["choices"]]
    whole = (await ask(url, "POST", sent.path, {**sent.body, "stream": None, "stream_options": None})).json()
    if sent.body.get("temperature", 1) == 0:
        assert "".join(map(text_of, chunks)) == text_of(whole["choices"][0])
    assert len("".join(map(text_of, chunks))) == whole["usage"]["completion_tokens"]
    assert chunks[-1]["finish_reason"] == "length"
    check_usage(events, sent.body.get("stream_options") or {}, whole["usage"])


def check_usage(events: list[Any], options: dict[str, Any], total: dict[str, Any]) -> None:
    """Usage comes last, without choices, and in every chunk where that was asked for; never unasked."""
    if not options:
        assert all(event["choices"] and "usage" not in event for event in events)
        return
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == total
    assert {"queue_time_ms", "mean_itl_ms", "speculative_decoding"} <= set(events[-1]["metrics"])
    for event in events[:-1]:
        assert (event["usage"] is not None) == bool(options.get("continuous_usage_stats"))


async def test_lm_eval_finds_a_score_for_every_token_of_every_prompt(url: str) -> None:
    body = LM_EVAL_SCORES.body
    choices = (await ask(url, "POST", COMPLETIONS, body)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt in zip(choices, body["prompt"], strict=True):
        scores = choice["logprobs"]
        # As lm-eval reads them: the generated token is cut off, the first of the prompt has no score.
        assert scores["token_logprobs"][:-1] == [None, *(-i / 4 for i in range(1, len(prompt)))]
        assert scores["tokens"][:-1] == [chr(token) for token in prompt]
        assert scores["top_logprobs"][0] is None
        for token, score, top in zip(
            scores["tokens"][1:-1], scores["token_logprobs"][1:-1], scores["top_logprobs"][1:-1], strict=True
        ):
            assert top[token] == score
            assert max(top.values()) >= score  # whether the token was the likeliest one
        assert choice["text"].startswith("".join(map(chr, prompt)))


async def test_lm_eval_gets_its_texts_in_the_order_of_the_prompts(url: str) -> None:
    choices = (await ask(url, "POST", COMPLETIONS, LM_EVAL_TEXTS.body)).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "hihihihi"), (1, "abcabcab")]


async def test_lm_eval_can_use_the_servers_tokenizer(url: str) -> None:
    assert (await ask(url, "GET", "/tokenizer_info")).json()["eos_token"] == "$"
    body = {"prompt": "hé", "add_special_tokens": False}
    tokens = (await ask(url, "POST", "/tokenize", body)).json()["tokens"]
    assert tokens == [ord("h"), ord("é")]
    assert (await ask(url, "POST", "/detokenize", {"tokens": tokens})).json()["prompt"] == "hé"


async def test_what_they_ask_before_the_first_request(url: str) -> None:
    assert (await ask(url, "GET", "/health")).status == 200
    models = (await ask(url, "GET", "/v1/models")).json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "test-model"


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
async def test_a_context_too_small_is_told_in_the_words_they_look_for(
    url: str, path: str, prompt: str
) -> None:
    long = "x" * 300
    body = {prompt: long if prompt == "prompt" else [{"role": "user", "content": long}], "max_tokens": 8}
    reply = await ask(url, "POST", path, body)
    assert reply.status == 400
    assert b'"code":"context_length_exceeded"' in reply.body
    assert "this model's maximum context length is" in reply.json()["error"]["message"].lower()
