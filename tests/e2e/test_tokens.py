"""Tokens as clients see them: the tokenizer's endpoints, bytes of split characters, words not to be said."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from config import load_settings
from engine import Overloaded, build_engine
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import FakeEngine, FakeTokenizer
from tests.support.native import WITHOUT_KERNELS
from tests.support.tiny_models import (
    BOS_ID,
    BOS_TOKEN,
    CHAT_TEMPLATE,
    EOS_TOKEN,
    save_tiny_model,
    tiny_tokenizer,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "café 🙂"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A tiny Llama behind HTTP."""
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    flags = ["--dtype", "float32", "--num-kv-blocks", "64", "--speculative-method", "none"]
    engine = build_engine(load_settings([str(directory), *flags], environ=WITHOUT_KERNELS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.startup.build.use_compute_threads", lambda: torch.set_num_threads(1))
        await engine.start()
        async with server_url(engine) as url:
            yield url
        await engine.stop()


async def test_text_becomes_tokens_and_text_again(real_url: str) -> None:
    tokenizer = tiny_tokenizer()
    for text in ("The quick brown fox", "café 🙂", f"{EOS_TOKEN} x"):
        reply = await ask(real_url, "POST", TOKENIZE, {"model": MODEL, "prompt": text})
        token_ids = tokenizer.encode(text)
        assert reply.json() == {
            "count": len(token_ids),
            "max_model_len": 256,
            "tokens": token_ids,
            "token_strs": None,
        }
        back = await ask(real_url, "POST", DETOKENIZE, {"tokens": token_ids})
        assert back.json() == {"prompt": text}
    reply = await ask(real_url, "POST", TOKENIZE, {"prompt": "The fox", "return_token_strs": True})
    assert reply.json()["token_strs"] == tokenizer.convert_ids_to_tokens(reply.json()["tokens"])


async def test_messages_become_what_the_model_reads(real_url: str) -> None:
    found = (await ask(real_url, "POST", TOKENIZE, {"messages": HELLO})).json()["tokens"]
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    assert found == (await ask(real_url, "POST", CHAT, body)).json()["prompt_token_ids"]


async def test_special_tokens_are_added_to_text_and_not_to_messages(url: str) -> None:
    async with server_url(FakeEngine(adds_bos=True)) as bos_url:
        for body, text in (
            ({"prompt": "ab"}, "^ab"),
            ({"prompt": "ab", "add_special_tokens": False}, "ab"),
            ({"messages": [{"role": "user", "content": "a"}]}, "<user>a"),
            ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "^<user>a"),
        ):
            found = (await ask(bos_url, "POST", TOKENIZE, body)).json()
            assert "".join(map(chr, found["tokens"])) == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": HELLO}, "prompt"),
        (TOKENIZE, {"prompt": ["a"]}, "prompt"),
        (TOKENIZE, {"prompt": 5}, "prompt"),
        (TOKENIZE, {"prompt": "a", "add_special_tokens": "true"}, "add_special_tokens"),
        (TOKENIZE, {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        (TOKENIZE, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (TOKENIZE, {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        (TOKENIZE, {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": "1"}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [1114112]}, "tokens"),
        (DETOKENIZE, {"tokens": [True]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [10**30]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(url: str, path: str, body: dict[str, object], param: str) -> None:
    reply = await ask(url, "POST", path, body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_nothing_and_an_unknown_model(url: str) -> None:
    assert (await ask(url, "POST", TOKENIZE, {"prompt": ""})).json()["tokens"] == []
    assert (await ask(url, "POST", DETOKENIZE, {"tokens": []})).json() == {"prompt": ""}
    for path, body in ((TOKENIZE, {"prompt": "a"}), (DETOKENIZE, {"tokens": [1]})):
        assert (await ask(url, "POST", path, {**body, "model": "nope"})).status == 404


async def test_the_tokenizer_tells_about_itself(real_url: str) -> None:
    found = (await ask(real_url, "GET", "/tokenizer_info")).json()
    assert found["bos_token"] == BOS_TOKEN
    assert found["eos_token"] == EOS_TOKEN
    assert found["unk_token"] is None
    assert found["chat_template"] == CHAT_TEMPLATE
    assert found["model_max_length"] == 256
    assert found["vocab_size"] == 512
    assert isinstance(found["tokenizer_class"], str)


async def test_the_server_tells_about_itself(real_url: str, url: str) -> None:
    assert set((await ask(real_url, "GET", "/version")).json()) == {"version"}
    load = (await ask(real_url, "GET", "/load")).json()
    assert load["server_load"] == load["num_requests_running"] == load["num_requests_waiting"] == 0
    info = (await ask(real_url, "GET", "/server_info")).json()
    assert info["state"] == "ready"
    assert info["served_model_names"] == [MODEL, "org/alias"]
    assert (info["model"]["max_model_len"], info["model"]["dtype"]) == (256, "float32")
    assert (info["model"]["max_num_seqs"], info["model"]["max_num_batched_tokens"]) == (64, 2048)
    origins = info["model"]["size_origins"]
    assert origins["max_num_seqs"] == origins["max_num_batched_tokens"] == "default"
    assert set(info["settings"]) == {"cache", "model", "scheduler", "speculation"}
    assert info["speculation"] == {
        **{"on": False, "why_off": "No drafter is loaded: --speculative-method is none."},
        **{"enabled": True, "num_tokens": 0, "length_policy": "goodput"},
        **{"schedule": "auto", "drafters": [], "speedup": 1.0, "theoretical_speedup": 1.0},
        "formula": {"alpha": 0.0, "gamma": 0.0, "cost_ratio": 0.0},
    }


async def test_nothing_about_keys_is_told() -> None:
    async with server_url(FakeEngine(), api_key=("secret-key",)) as url:
        for path in ("/server_info", "/load", "/tokenizer_info", "/version"):
            assert (await ask(url, "GET", path)).status == 401
            reply = await ask(url, "GET", path, None, {"authorization": "Bearer secret-key"})
            assert reply.status == 200
            assert b"secret" not in reply.body


@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_of_split_characters_join_to_the_text(real_url: str, stream: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 120, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 3, "stream": stream, "skip_special_tokens": False}
    reply = await ask(real_url, "POST", CHAT, body)
    if stream:
        choices = [event["choices"][0] for event in events_of(reply.body)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        content = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    else:
        choice = reply.json()["choices"][0]
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
    assert len(content) == 120
    assert b"".join(bytes(each["bytes"]) for each in content).decode("utf-8", "replace") == text
    split = [each for each in content if "\ufffd" in each["token"]]
    assert split, "no character was split: the test shows nothing"
    assert all(bytes(each["bytes"]).decode("utf-8", "replace") == each["token"] for each in content)
    assert all(each["bytes"] for entry in content for each in entry["top_logprobs"])


async def test_an_id_without_a_token_has_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "token_bytes", lambda *_: None)
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", CHAT, {"messages": HELLO, "logprobs": True, "max_tokens": 1})
    assert reply.json()["choices"][0]["logprobs"]["content"][0]["bytes"] is None


async def test_a_bad_word_of_several_tokens_is_not_completed(real_url: str) -> None:
    """Only its last token is out, and only where the others came: the word's beginning may be said."""
    body = {"prompt": "x", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    plain = (await ask(real_url, "POST", "/v1/completions", body)).json()["choices"][0]
    tokenizer = tiny_tokenizer()
    pieces = [tokenizer.decode([token_id]) for token_id in plain["token_ids"]]
    place = next(
        i
        for i in range(len(pieces) - 1)
        if pieces[i].strip()
        and tokenizer.encode(pieces[i].lstrip() + pieces[i + 1], add_special_tokens=False)
        == plain["token_ids"][i : i + 2]
    )
    word = pieces[place] + pieces[place + 1]
    reply = await ask(real_url, "POST", "/v1/completions", {**body, "bad_words": [word]})
    found = reply.json()["choices"][0]["token_ids"]
    assert found[: place + 1] == plain["token_ids"][: place + 1]
    assert found[place + 1] != plain["token_ids"][place + 1]
    pair = plain["token_ids"][place : place + 2]
    assert all(found[i : i + 2] != pair for i in range(len(found)))


async def test_what_leaves_no_token_at_all_is_refused(real_url: str) -> None:
    basics = {"prompt": "x", "max_tokens": 4}
    bos = {"bad_words": [BOS_TOKEN], "allowed_token_ids": [BOS_ID]}
    eos = {"min_tokens": 1, "allowed_token_ids": [2]}
    stop = {"min_tokens": 1, "allowed_token_ids": [2, 9], "stop_token_ids": [9]}
    for body in (bos, eos, stop):
        reply = await ask(real_url, "POST", "/v1/completions", {**basics, **body})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "allowed_token_ids")
    reply = await ask(real_url, "POST", "/v1/completions", {**basics, **eos, "ignore_eos": True})
    assert reply.status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(TOKENIZE, {"prompt": "a"}), (TOKENIZE, {"messages": HELLO}), (DETOKENIZE, {"tokens": [1]})],
)
async def test_they_pass_admission_before_anything_is_read(path: str, body: dict[str, object]) -> None:
    engine = FakeEngine(refusal=Overloaded("No place.", code="queue_full", retry_after_s=7))
    async with server_url(engine) as url:
        reply = await ask(url, "POST", path, body)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "queue_full")
        assert reply.headers["retry-after"] == "7"


async def test_large_answers_are_whole() -> None:
    text = "aé\U0001f642" * 20_000
    async with server_url(FakeEngine()) as url:
        reply = await ask(url, "POST", TOKENIZE, {"prompt": text, "return_token_strs": True})
        found = reply.json()
        assert found["tokens"] == list(map(ord, text))
        assert found["token_strs"] == [f"<{char}>" for char in text]
        back = await ask(url, "POST", DETOKENIZE, {"tokens": found["tokens"]})
        assert back.json() == {"prompt": text}
