"""/v1/completions over a real socket: shapes, choices, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine import FillInMiddle, Priority
from server.api.sampling import choice_seed
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import Wire, ask, events_of
from tests.support.fake_engine import FakeEngine

PATH = "/v1/completions"


async def test_json_reply_has_every_field() -> None:
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", PATH, {"prompt": "abc", "max_tokens": 5, "temperature": 0})
    found = reply.json()
    assert reply.status == 200
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 1_700_000_000
    assert found == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "metrics": {
            "time_to_first_token_ms": 10.0,
            "generation_time_ms": 100.0,
            "queue_time_ms": 1.0,
            "mean_itl_ms": 5.0,
            "tokens_per_second": 40.0,
            "num_preemptions": 0,
            "speculative_decoding": {
                "mean_acceptance_length": None,
                "draft_acceptance_rate": 0.0,
                "acceptance_histogram": [],
                "num_spec_steps": 0,
                "num_draft_tokens": 0,
                "num_accepted_draft_tokens": 0,
            },
        },
    }


async def test_defaults_that_are_spelled_out_mean_the_defaults() -> None:
    nulls = dict.fromkeys(
        ("stop", "logprobs", "max_tokens", "n", "seed", "stream", "stream_options", "logit_bias", "tools")
    )
    engine = FakeEngine()
    async with server_url(engine) as url:
        reply = await ask(
            url, "POST", PATH, {"prompt": "abc", "model": None, "repetition_penalty": 1.0, **nulls}
        )
    sampling = engine.requests[0].sampling
    assert (reply.status, sampling.max_tokens, sampling.temperature, sampling.stop) == (200, 16, 1.0, ())


async def test_parameters_reach_the_engine() -> None:
    body = {
        "prompt": [97, 98],
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": -5,
        "logit_bias": {"97": -100, "98": 1.5},
        "allowed_token_ids": [98, 97, 97],
        "stop": ["x", "yz"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "priority": -3,
        "service_tier": "flex",
    }
    engine = FakeEngine()
    async with server_url(engine) as url:
        assert (await ask(url, "POST", PATH, body)).status == 200
    request = engine.requests[0]
    sampling = request.sampling
    assert list(request.prompt_token_ids) == [97, 98]
    assert (request.priority, request.tenant) == (-3, None)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.5, -5, 0)
    assert sampling.logit_bias == ((97, -100.0), (98, 1.5))
    assert sampling.allowed_token_ids == (97, 98)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "yz"), frozenset({5}))
    assert (sampling.ignore_eos, sampling.include_stop_str_in_output) == (True, True)
    assert not sampling.skip_special_tokens


async def test_service_tier_is_a_priority() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        for tier in ("auto", "default", "flex", "priority"):
            await ask(url, "POST", PATH, {"prompt": "a", "service_tier": tier})
    assert [each.priority for each in engine.requests] == [0, 0, Priority.FLEX, Priority.HIGH]


async def test_every_prompt_gets_n_choices_with_their_own_seeds() -> None:
    engine = FakeEngine()
    body = {"prompt": ["abcd", "xyz"], "n": 3, "seed": 1, "max_tokens": 2, "best_of": 3}
    async with server_url(engine) as url:
        found = (await ask(url, "POST", PATH, body)).json()
    seeds = [choice_seed(1, j) for j in range(3)]
    assert seeds[0] == 1
    assert len(set(seeds)) == 3
    expected = [
        prompt[seed % len(prompt)] + prompt[(seed + 1) % len(prompt)]
        for prompt in ("abcd", "xyz")
        for seed in seeds
    ]
    assert [choice["text"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert len({request.request_id for request in engine.requests}) == 6
    assert found["usage"]["prompt_tokens"] == 7
    assert found["usage"]["completion_tokens"] == 12
    assert engine.num_encoded == 2


async def test_without_a_seed_equal_prompts_do_not_share_one() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        await ask(url, "POST", PATH, {"prompt": ["abcd"] * 4, "n": 2, "max_tokens": 2})
    assert len({request.sampling.seed for request in engine.requests}) == 8


@pytest.mark.parametrize("path", [PATH, "/infill"])
async def test_a_seed_of_minus_one_asks_for_a_fresh_one(path: str) -> None:
    engine = FakeEngine(fill_in_middle=FillInMiddle(1, 2, 3, frozenset()))
    async with server_url(engine) as url:
        body = {"prompt": "abcd", "max_tokens": 2, "input_prefix": "a", "input_suffix": "b", "seed": -1}
        for _ in range(2):
            assert (await ask(url, "POST", path, body)).status == 200
    seeds = {request.sampling.seed for request in engine.requests}
    assert len(seeds) == 2 and -1 not in seeds


async def test_a_seed_is_every_prompts_own() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        await ask(url, "POST", PATH, {"prompt": ["abcd"] * 3, "seed": 7, "max_tokens": 2})
    assert [request.sampling.seed for request in engine.requests] == [7, 7, 7]


async def test_a_stream_of_many_choices_is_each_choice_in_order() -> None:
    body = {"prompt": ["abcd", "xyz"], "n": 2, "temperature": 0, "max_tokens": 9}
    async with server_url(FakeEngine()) as url:
        whole = (await ask(url, "POST", PATH, body)).json()
        reply = await ask(url, "POST", PATH, {**body, "stream": True})
    texts = [""] * 4
    reasons: list[list[str]] = [[] for _ in texts]
    order = []
    for event in events_of(reply.body):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        order.append(choice["index"])
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [["length"]] * 4
    assert sorted(order[:4]) == [0, 1, 2, 3]  # they come side by side, not one after another


async def test_four_forms_of_prompt_are_the_same_prompt() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
            assert (await ask(url, "POST", PATH, {"prompt": prompt, "temperature": 0})).status == 200
    assert [list(request.prompt_token_ids) for request in engine.requests] == [[97, 98]] * 4


async def test_echo_shows_the_prompt_before_the_text() -> None:
    async with server_url(FakeEngine()) as url:
        for body in (
            {"prompt": "ab", "echo": True, "max_tokens": 2},
            {"prompt": [97, 98], "echo": True, "max_tokens": 2},
            {"prompt": "xxxab", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 2},
        ):
            found = (await ask(url, "POST", PATH, {**body, "temperature": 0})).json()
            assert found["choices"][0]["text"] == "abab"
            assert found["usage"]["completion_tokens"] == 2
            streamed = await ask(url, "POST", PATH, {**body, "temperature": 0, "stream": True})
            assert "".join(each["choices"][0]["text"] for each in events_of(streamed.body)) == "abab"


async def test_no_tokens_asked_for_costs_no_generation() -> None:
    engine = FakeEngine()
    async with server_url(engine) as url:
        found = (await ask(url, "POST", PATH, {"prompt": "ab", "echo": True, "max_tokens": 0})).json()
    assert found["choices"][0]["text"] == "ab"
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    assert [request.sampling.max_tokens for request in engine.requests] == [0]


async def test_truncation_keeps_the_last_tokens() -> None:
    engine = FakeEngine(max_model_len=10)
    async with server_url(engine) as url:
        for keep in (2, -1, 10):
            body = {"prompt": "abcdefgh", "truncate_prompt_tokens": keep, "max_tokens": 5 if keep < 0 else 2}
            assert (await ask(url, "POST", PATH, body)).status == 200
    prompts = ["".join(map(chr, request.prompt_token_ids)) for request in engine.requests]
    assert prompts == ["gh", "defgh", "abcdefgh"]


async def test_truncation_takes_a_text_that_is_longer_than_any_prompt() -> None:
    engine = FakeEngine(max_model_len=10, char_limit=20)
    async with server_url(engine) as url:
        for keep in (2, -1):
            body = {"prompt": "x" * 100 + "abcdefgh", "truncate_prompt_tokens": keep, "max_tokens": 2}
            assert (await ask(url, "POST", PATH, body)).status == 200
    prompts = ["".join(map(chr, request.prompt_token_ids)) for request in engine.requests]
    assert prompts == ["gh", "abcdefgh"]


async def test_more_than_the_context_cannot_be_kept() -> None:
    engine = FakeEngine(max_model_len=10)
    async with server_url(engine) as url:
        body = {"prompt": "ab", "truncate_prompt_tokens": 11, "max_tokens": 2}
        reply = await ask(url, "POST", PATH, body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert "is 11; this model's maximum context length is 10 tokens" in reply.json()["error"]["message"]
    assert engine.num_encoded == 0


async def test_a_body_may_come_in_any_pieces() -> None:
    body = json.dumps({"prompt": "é🦀", "max_tokens": 2, "temperature": 0}, ensure_ascii=False).encode()
    async with server_url(FakeEngine()) as url:
        wire = await Wire.connect(url)
        await wire.send(
            "POST", PATH, b"", {"content-type": "application/json", "content-length": str(len(body))}
        )
        for i in range(len(body)):
            wire.writer.write(body[i : i + 1])
            await wire.writer.drain()
            await asyncio.sleep(0)
        assert (await wire.reply()).json()["choices"][0]["text"] == "é🦀"
        await wire.close()


async def test_logprobs_are_parallel_lists() -> None:
    body = {"prompt": "ab", "logprobs": 2, "max_tokens": 3, "temperature": 0}
    expected = {
        "tokens": ["a", "b", "a"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"a": -0.5, "b": -1.5}],
        "text_offset": [0, 1, 2],
    }
    async with server_url(FakeEngine()) as url:
        found = (await ask(url, "POST", PATH, body)).json()["choices"][0]["logprobs"]
        events = events_of((await ask(url, "POST", PATH, {**body, "stream": True})).body)
    joined = {
        name: [value for event in events for value in event["choices"][0]["logprobs"][name]]
        for name in expected
    }
    assert found == expected
    assert joined == expected


async def test_token_ids_come_when_asked_for() -> None:
    body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    async with server_url(FakeEngine(merge=2)) as url:
        choice = (await ask(url, "POST", PATH, body)).json()["choices"][0]
        events = events_of((await ask(url, "POST", PATH, {**body, "stream": True})).body)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [97, 98, 97])
    parts = [(e["choices"][0]["prompt_token_ids"], e["choices"][0]["token_ids"]) for e in events]
    assert parts == [([97, 98], [97, 98]), (None, [97])]


async def test_a_stop_string_is_named_and_not_shown() -> None:
    body = {"prompt": "abc", "stop": "c", "temperature": 0}
    async with server_url(FakeEngine()) as url:
        choice = (await ask(url, "POST", PATH, body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "c")


async def test_times_are_left_out_when_the_server_says_so() -> None:
    async with server_url(FakeEngine(), per_request_metrics=False) as url:
        assert "metrics" not in (await ask(url, "POST", PATH, {"prompt": "a"})).json()
