"""Large JSON in pieces says what the encoder says in one run, and no run of it is long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.api.long_list import LongList
from server.api.openai import reply as reply_module
from server.http import json_pieces as module
from server.http.json_pieces import PIECE_BYTES, encoded_off_loop, json_pieces
from server.http.json_reply import encode_json
from server.http.turns import Turns
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support.fake_engine import FakeEngine

SMALL: list[Any] = [
    {},
    [],
    "",
    {"a": [], "b": {}, "c": ()},
    [1, 2.5, None, True, "x"],
    {"text": 'a\n"\\\u2028é\ud800\U0001f642', "n": {"m": [[1], [2]], "o": [{"p": 1}, {}]}},
]
LARGE: list[Any] = [
    "\U0001f642\ud800" * 50_000,
    list(range(100_000)),
    {"choices": [{"token_ids": list(range(5000)), "text": "é" * 30_000} for _ in range(3)]},
    [["a"] * 10] * 5000,
]


@pytest.mark.parametrize("value", SMALL + LARGE)
def test_the_pieces_are_the_json(value: Any) -> None:
    pieces = list(json_pieces(value))
    assert b"".join(pieces).decode("ascii") == encode_json(value)
    assert all(PIECE_BYTES <= len(piece) < 4 * PIECE_BYTES for piece in pieces[:-1])


def test_what_is_made_as_it_is_read_is_a_list() -> None:
    def items() -> Iterator[object]:
        return ({"x": [i]} for i in range(1000))

    expected = encode_json(list(items()))
    for value in (LongList(items), items()):
        assert b"".join(json_pieces(value)).decode("ascii") == expected
    for value in (LongList(items), items()):
        assert encode_json(value) == expected
    for value in (LongList(lambda: ()), iter(())):
        assert b"".join(json_pieces(value)) == b"[]"


def test_no_run_of_the_encoder_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the interpreter: what one run writes is bounded, whatever the whole comes to."""
    runs: list[int] = []

    def encode(value: object) -> str:
        runs.append(len(encode_json(value)))
        return encode_json(value)

    monkeypatch.setattr(module, "encode_json", encode)
    records = LongList(lambda: ({"x": list(range(100))} for _ in range(1000)))
    for value in (*LARGE, records, {"a": records}):
        list(json_pieces(value))
    assert max(runs) < 4 * PIECE_BYTES


async def test_each_piece_is_made_when_the_one_before_was_taken() -> None:
    made = 0

    def items() -> Iterator[object]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield "x" * PIECE_BYTES

    pieces = encoded_off_loop(items(), Turns())
    await anext(pieces)
    await asyncio.sleep(0.01)
    assert made < 3
    await pieces.aclose()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_reply_says_what_a_small_one_does(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "n": 2, "prompt_logprobs": 3, "stream": stream}
    if path == "/v1/completions":
        body |= {"prompt": "abcdef", "logprobs": 2, "echo": True, "return_token_ids": True}
    else:
        body |= {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 2}
    found: list[Any] = []
    for limit in (2000, 0):
        monkeypatch.setattr(reply_module, "MANY_VALUES", limit)
        async with server_url(FakeEngine()) as url:
            reply = await ask(url, "POST", path, body)
        assert ("content-length" in reply.headers) == (limit > 0 and not stream)
        assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
        found.append(_undated(reply.body.decode(), stream))
    assert found[0] == found[1]


def _undated(text: str, stream: bool) -> list[Any]:
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part] if stream else [text]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    return [{**event, "id": None, "created": None} for event in parsed]
