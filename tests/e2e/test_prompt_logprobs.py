"""Log-probabilities of the prompt, echoed or on their own: shapes, choices, streams, no output at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from config import load_settings
from engine import RequestFailed, build_engine
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import FakeEngine
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny, plain_logits
from tests.support.tiny_models import save_tiny_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ECHO = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
ECHOED = {
    "tokens": ["a", "b", "c", "a", "b"],
    "token_logprobs": [None, -0.25, -0.5, -0.5, -0.5],
    "top_logprobs": [None, {"A": 0.0, "b": -0.25}, {"A": 0.0, "c": -0.5}, {"a": -0.5}, {"b": -0.5}],
    "text_offset": [0, 1, 2, 3, 4],
}
# What vLLM shows of the prompt "abc": the token itself, then the likeliest.
SHOWN = [
    None,
    {
        "98": {"logprob": -0.25, "rank": 2, "decoded_token": "b"},
        "65": {"logprob": 0.0, "rank": 1, "decoded_token": "A"},
    },
    {
        "99": {"logprob": -0.5, "rank": 2, "decoded_token": "c"},
        "65": {"logprob": 0.0, "rank": 1, "decoded_token": "A"},
    },
]


async def reply_to(body: dict[str, Any], path: str = COMPLETIONS, engine: FakeEngine | None = None) -> Any:
    async with server_url(engine or FakeEngine()) as url:
        reply = await ask(url, "POST", path, body)
    assert reply.status == 200, reply.body
    return reply.json()


async def events(body: dict[str, Any], path: str = COMPLETIONS, engine: FakeEngine | None = None) -> Any:
    async with server_url(engine or FakeEngine()) as url:
        reply = await ask(url, "POST", path, {**body, "stream": True})
    return events_of(reply.body)


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]])
async def test_an_echo_has_the_prompt_s_logprobs_and_then_the_output_s(prompt: object) -> None:
    choice = (await reply_to({**ECHO, "prompt": prompt}))["choices"][0]
    assert choice["text"] == "abcab"
    assert choice["logprobs"] == ECHOED
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("merge", [1, 5])
async def test_a_streamed_echo_is_the_same_in_pieces(merge: int) -> None:
    chunks = [event["choices"][0] for event in await events(ECHO, engine=FakeEngine(merge=merge))]
    assert "".join(chunk["text"] for chunk in chunks) == "abcab"
    found = {name: [value for chunk in chunks for value in chunk["logprobs"][name]] for name in ECHOED}
    assert found == ECHOED


async def test_the_sampled_token_s_alone() -> None:
    found = (await reply_to({**ECHO, "logprobs": 0}))["choices"][0]["logprobs"]
    assert found["top_logprobs"][:2] == [None, {"b": -0.25}]


async def test_prompt_logprobs_are_vllm_s() -> None:
    body = {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 2, "temperature": 0}
    choice = (await reply_to(body))["choices"][0]
    assert choice["prompt_logprobs"] == SHOWN
    assert choice["logprobs"] is None
    chunks = [event["choices"][0] for event in await events(body)]
    assert [chunk.get("prompt_logprobs") for chunk in chunks] == [SHOWN, None]


async def test_a_chat_has_them_beside_its_choices() -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt_logprobs": 0,
        "n": 2,
        "max_tokens": 2,
        "temperature": 0,
    }
    found = await reply_to(body, CHAT)
    assert found["prompt_logprobs"][:2] == [
        None,
        {str(ord("u")): {"logprob": -0.25, "rank": 2, "decoded_token": "u"}},
    ]
    assert len(found["prompt_logprobs"]) == len("<user>x") == found["usage"]["prompt_tokens"]
    chunks = await events(body, CHAT)
    assert sum(chunk.get("prompt_logprobs") == found["prompt_logprobs"] for chunk in chunks) == 2  # choices


async def test_both_may_be_asked_for_in_different_numbers() -> None:
    engine = FakeEngine()
    choice = (await reply_to({**ECHO, "logprobs": 3, "prompt_logprobs": 1}, engine=engine))["choices"][0]
    assert engine.requests[0].sampling.prompt_logprobs == 3
    assert choice["prompt_logprobs"] == SHOWN
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["A", "B", "C", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_share_what_the_first_one_brings(stream: bool) -> None:
    engine = FakeEngine()
    body = {**ECHO, "prompt": ["abc", "d"], "n": 3}
    if stream:
        found: list[list[Any]] = [[] for _ in range(6)]
        for event in await events(body, engine=engine):
            choice = event["choices"][0]
            found[choice["index"]] += choice["logprobs"]["token_logprobs"]
    else:
        choices = (await reply_to(body, engine=engine))["choices"]
        found = [choice["logprobs"]["token_logprobs"] for choice in choices]
    assert found[:3] == [ECHOED["token_logprobs"]] * 3
    assert found[3:] == [[None, -0.5, -0.5]] * 3
    asked = [request.sampling.prompt_logprobs for request in engine.requests]
    assert asked == [1, None, None, 1, None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_first_choice_keeps_nobody_waiting(stream: bool) -> None:
    engine = FakeEngine(failure=RequestFailed("no", "sampler"))
    async with server_url(engine) as url:
        reply = await ask(url, "POST", COMPLETIONS, {**ECHO, "n": 3, "stream": stream})
    assert reply.status == 500
    assert engine.num_open == 0


# No output at all.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_without_output(stream: bool) -> None:
    """A prompt may fill the whole context."""
    engine = FakeEngine(max_model_len=3)
    body = {**ECHO, "max_tokens": 0, "prompt_logprobs": 0}
    if stream:
        (event,) = await events(body, engine=engine)
        choice = event["choices"][0]
    else:
        found = await reply_to(body, engine=engine)
        choice = found["choices"][0]
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (3, 0)
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["prompt_logprobs"]) == 3
    (request,) = engine.requests
    assert list(request.prompt_token_ids) == [97, 98, 99]
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (0, 1)


async def test_one_token_has_nothing_to_score() -> None:
    engine = FakeEngine()
    choice = (await reply_to({**ECHO, "prompt": "a", "max_tokens": 0}, engine=engine))["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }


async def test_a_real_model_scores_batches_as_harnesses_ask_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval: token-id prompts in one request, echo, one token of output, which it drops."""
    monkeypatch.setattr("engine.startup.build.use_compute_threads", lambda: torch.set_num_threads(1))
    flags = ["--dtype", "float32", "--num-kv-blocks", "64", "--max-num-batched-tokens", "16"]
    engine = build_engine(
        load_settings([str(save_tiny_model("llama", tmp_path / "m")), *flags], environ=WITHOUT_KERNELS)
    )
    prompts = [[7, 8, 9, 10] * 6, [7, 8, 9, 10, 11], [20, 21] * 12]
    body = {"prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    await engine.start()
    try:
        async with server_url(engine) as url:
            replies = [
                (await ask(url, "POST", COMPLETIONS, {**body, "max_tokens": number})).json()
                for number in (1, 1, 0)
            ]
            whole = [7, 8, 9, 10] * 64  # fills the context
            full = await ask(url, "POST", COMPLETIONS, {**body, "prompt": whole, "max_tokens": 0})
            # In the end the last token is forced, whatever it is: also one that ends replies.
            last = await ask(url, "POST", COMPLETIONS, {**body, "prompt": [7, 8, 2], "max_tokens": 0})
            page = (await ask(url, "GET", "/metrics")).body.decode()
    finally:
        await engine.stop()
    for prompt, *choices in zip(prompts, *(reply["choices"] for reply in replies), strict=True):
        logprobs = plain_logits(load_tiny("llama"), prompt).log_softmax(dim=1)
        expected = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
        greedy = [
            float(row.max()) == float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=False)
        ]
        for choice, number in zip(choices, (1, 1, 0), strict=True):
            found = choice["logprobs"]
            num_shown = len(found["token_logprobs"])
            assert num_shown == len(prompt) + number
            own, top = found["token_logprobs"][1 : len(prompt)], found["top_logprobs"][1 : len(prompt)]
            assert own == pytest.approx(expected, abs=1e-3)
            assert [value == max(row.values()) for value, row in zip(own, top, strict=True)] == greedy
    assert replies[2]["usage"]["completion_tokens"] == 0
    assert len(full.json()["choices"][0]["logprobs"]["token_logprobs"]) == 256
    expected_last = float(plain_logits(load_tiny("llama"), [7, 8, 2]).log_softmax(dim=1)[1, 2])
    found = last.json()["choices"][0]
    assert found["logprobs"]["token_logprobs"][2] == pytest.approx(expected_last, abs=1e-3)
    assert found["finish_reason"] == "length"
    assert 'slipstream_requests_total{finish_reason="length",model_name="test-model"} 5.0' in page
    assert (engine.metrics.prompt_tokens, engine.metrics.generation_tokens) == (
        3 * (24 + 5 + 24) + 256 + 3,
        6,
    )
