"""Fill-in-the-middle over a real socket: `suffix` in /v1/completions, and llama.cpp's /infill."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import FillInMiddle
from tests.e2e.http_server import MODEL, server_url
from tests.e2e.wire import RawReply, ask
from tests.support.fake_engine import FakeEngine

MARKS = FillInMiddle(ord("P"), ord("S"), ord("M"), frozenset({ord("E")}), repository=ord("R"), file=ord("F"))
INFILL: dict[str, Any] = {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 3, "temperature": 0}


def coder(**more: Any) -> FakeEngine:
    return FakeEngine(fill_in_middle=MARKS, **more)


def prompt_of(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt_token_ids))


async def post(engine: FakeEngine, path: str, body: object, **settings: Any) -> RawReply:
    async with server_url(engine, **settings) as url:
        return await ask(url, "POST", path, body)


@pytest.mark.parametrize(
    ("prompt", "more", "expected"),
    [
        ("ab", {}, "^PabScdM"),
        ("ab", {"add_special_tokens": False}, "PabScdM"),
        ([97, 98], {}, "PabScdM"),
    ],
)
async def test_a_suffix_asks_for_what_stands_before_it(
    prompt: object, more: dict[str, object], expected: str
) -> None:
    engine = coder(adds_bos=True)
    body = {"prompt": prompt, "suffix": "cd", "stop_token_ids": [5], "max_tokens": 3, **more}
    reply = await post(engine, "/v1/completions", body)
    assert reply.status == 200 and len(reply.json()["choices"][0]["text"]) == 3
    assert prompt_of(engine) == expected
    assert engine.requests[-1].sampling.stop_token_ids == {5, ord("E")}


async def test_an_empty_suffix_asks_for_nothing() -> None:
    engine = FakeEngine()
    reply = await post(engine, "/v1/completions", {"prompt": "ab", "suffix": ""})
    assert reply.status == 200 and prompt_of(engine) == "ab"


@pytest.mark.parametrize(
    ("engine", "path", "body", "param"),
    [
        (FakeEngine(), "/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        (coder(), "/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        (coder(), "/v1/completions", {"prompt": "a", "suffix": 1}, "suffix"),
        (coder(), "/v1/completions", {"prompt": "a" * 300, "suffix": "b"}, "prompt"),
        (FakeEngine(), "/infill", INFILL, "input_prefix"),
        (coder(), "/infill", {"input_prefix": "a"}, "input_suffix"),
        (coder(), "/infill", {**INFILL, "logit_bias": [[1, 2, 3]]}, "logit_bias"),
        (coder(), "/infill", {**INFILL, "thinking_token_budget": 3}, "thinking_token_budget"),
        (coder(), "/infill", {**INFILL, "model": "nope"}, "model"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    engine: FakeEngine, path: str, body: object, param: str
) -> None:
    reply = await post(engine, path, body)
    assert reply.status in (400, 404) and reply.json()["error"]["param"] == param
    assert not engine.requests


async def test_infill_replies_as_llama_cpp_does() -> None:
    engine = coder()
    reply = await post(
        engine, "/infill", {**INFILL, "prompt": "x", "repeat_penalty": 1.5, "cache_prompt": True}
    )
    assert prompt_of(engine) == "PabxScdM"
    assert engine.requests[-1].sampling.repetition_penalty == 1.5
    assert reply.status == 200 and "x-slipstream-ignored" not in reply.headers
    found = reply.json()
    pace = {"n": 3, "ms": 100.0, "per_token_ms": 33.333, "per_second": 30.0}
    timings = found.pop("timings")
    assert {name: timings[f"predicted_{name}"] for name in pace} == pace
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (2, 6, 9.0)
    assert found == {
        "index": 0,
        "content": "Pab",
        "id_slot": 0,
        "stop": True,
        "model": MODEL,
        "tokens_predicted": 3,
        "tokens_evaluated": 8,
        "tokens_cached": 2,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
    }


async def test_an_infill_stream_has_the_same_text_and_ends_with_the_figures() -> None:
    reply = await post(coder(), "/infill", {**INFILL, "stop": ["b"], "stream": True, "n_predict": -1})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = reply.body.decode().split("\n\n")
    assert parts.pop() == ""
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert [(event["content"], event["stop"]) for event in events] == [("P", False), ("a", False), ("", True)]
    assert (events[-1]["stop_type"], events[-1]["stopping_word"]) == ("word", "b")


async def test_infill_names_what_it_ignores_and_shows_the_fields_asked_for() -> None:
    body = {**INFILL, "response_fields": ["content", "timings/cache_n", "nope"], "samplers": ["top_k"]}
    reply = await post(coder(), "/infill", body)
    assert reply.headers["x-slipstream-ignored"] == "samplers"
    assert reply.json() == {"content": "Pab", "timings/cache_n": 2}


async def test_other_files_come_first_as_the_model_knows_them() -> None:
    files = [{"filename": "a.py", "text": "1"}, {"filename": "b.py", "text": "2"}]
    engine = coder()
    await post(engine, "/infill", {**INFILL, "input_extra": files})
    assert prompt_of(engine) == "Rrepository\nFa.py\n1Fb.py\n2Ffile\nPabScdM"


async def test_what_does_not_fit_is_left_out_far_from_the_cursor() -> None:
    engine = coder(max_model_len=32)
    body = {**INFILL, "input_prefix": "a" * 40 + "b", "input_suffix": "c" + "d" * 40, "n_predict": 5}
    reply = await post(engine, "/infill", {**body, "input_extra": [{"text": "e" * 20}]})
    assert reply.json()["truncated"] is True
    assert prompt_of(engine) == "P" + "a" * 17 + "bS" + "c" + "d" * 5 + "M"  # 24 of 32 - 5 - 3, 3 to 1


async def test_other_files_fill_what_is_left_with_their_end() -> None:
    engine = coder(max_model_len=32)
    body = {**INFILL, "input_extra": [{"text": "e" * 40}], "n_predict": 4}
    await post(engine, "/infill", body)
    assert prompt_of(engine) == "e" * 15 + "Ffile\nPabScdM"
    assert len(prompt_of(engine)) == 28


async def test_files_that_do_not_fit_are_not_read() -> None:
    engine = coder(max_model_len=32)
    files = [{"text": "d"}] * 1000 + [{"text": "e" * 40}]
    reply = await post(engine, "/infill", {**INFILL, "input_extra": files, "n_predict": 4})
    assert reply.json()["truncated"] is True
    assert prompt_of(engine) == "e" * 15 + "Ffile\nPabScdM"
    assert engine.num_encoded == 5  # nothing, both texts, the last file, and what follows it


async def test_an_error_after_the_first_byte_is_an_event() -> None:
    from engine import RequestFailed

    engine = coder(failure=RequestFailed("no", stage="sample"), fail_at=1)
    reply = await post(engine, "/infill", {**INFILL, "stream": True})
    last = reply.body.decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "sample_failed"
