"""A stream's texts, joined, are the whole text: in every script, wherever tokens and stops fall."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from engine import Finish, FinishReason, GenerationRequest
from engine.loop.stream import RequestStream
from engine.text.detokenizer import Detokenizer
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask, events_of
from tests.support.fake_engine import TIMING, FakeEngine
from tests.unit.text.builders import load

TEXTS = (
    "The end.\nNext line",
    "Grüße, c'est déjà l'été",
    "Ελληνικά και кириллица",
    "你好,世界。再见",
    "こんにちは、カタカナ",
    "안녕하세요 세계",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "שלום עולם",
    "สวัสดีชาวโลก",
    "🦀🙂\ufe0f👩\u200d👧🇩🇪👍🏽 ok",
    "a\u0301e\u0308 \ufffd 𝒳𝕐 \u0000\t",
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS_AN_EVENT = (1, 2, 5)


@cache
def token_of_byte() -> dict[int, int]:
    """The id of the token that is just one byte."""
    tokenizer = load("byte_level")
    found = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return {byte: found[bytes([byte])] for byte in range(256)}


@dataclass
class BytesEngine(FakeEngine):
    """Says `says`, a token a byte, `tokens_an_event` at once, through the real text path."""

    says: str = ""
    tokens_an_event: int = 1
    speaking: set[asyncio.Task[None]] = field(default_factory=set)

    def submit(self, request: GenerationRequest) -> Any:
        sampling = request.sampling
        detokenizer = Detokenizer(
            load("byte_level"), (), stop=sampling.stop, include_stop=sampling.include_stop_str_in_output
        )
        stream = RequestStream(
            request.request_id, detokenizer, lambda *_: None, checks_stops=bool(sampling.stop)
        )
        task = asyncio.create_task(self.speak(stream))
        self.speaking.add(task)
        task.add_done_callback(self.speaking.discard)
        return stream

    async def speak(self, stream: RequestStream) -> None:
        stop = None
        for i, byte in enumerate(said := self.says.encode()):
            stop = stream.put(token_of_byte()[byte], None, shown=True)
            if stop is not None:
                break
            if i % self.tokens_an_event == 0:
                for _ in range(3):  # let the reader take them
                    await asyncio.sleep(0)
        reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
        stream.finish(Finish(reason, stop, None, 1, len(said), 0, TIMING))


def texts_of(choices: list[Any], key: str) -> str:
    """What choices, or chunks of one, say."""
    return "".join(each["text"] if "text" in each else each[key].get("content", "") for each in choices)


async def both(url: str, path: str, more: dict[str, Any]) -> tuple[str, Any]:
    """The text and end of the reply in one piece, which those of the stream must equal."""
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    body = {**prompt, "max_tokens": 200, **more}
    whole = (await ask(url, "POST", path, body)).json()["choices"][0]
    events = events_of((await ask(url, "POST", path, {**body, "stream": True})).body)
    chunks = [event["choices"][0] for event in events]
    ends = [(each["finish_reason"], each.get("stop_reason")) for each in chunks if each["finish_reason"]]
    text = texts_of([whole], "message")
    assert texts_of(chunks, "delta") == text
    assert ends == [(whole["finish_reason"], whole["stop_reason"])]
    return text, ends[0]


@pytest.mark.by_default
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_they_are_equal_with_a_stop_at_every_split(text: str, path: str) -> None:
    engine = BytesEngine(says=text)
    async with server_url(engine) as url:
        for engine.tokens_an_event in TOKENS_AN_EVENT:
            assert await both(url, path, {}) == (text, ("length", None))
        for i in range(len(text)):
            stop = text[i : i + 1 + i % 3]  # of one to three characters, code points that join included
            found = text.index(stop)
            engine.tokens_an_event = TOKENS_AN_EVENT[i % 3]
            assert await both(url, path, {"stop": stop}) == (text[:found], ("stop", stop))
            kept = {"stop": ["nowhere", stop], "include_stop_str_in_output": True}
            assert await both(url, path, kept) == (text[: found + len(stop)], ("stop", stop))


async def test_what_only_begins_like_a_stop_is_shown_in_the_end() -> None:
    engine = BytesEngine()
    async with server_url(engine) as url:
        for engine.says in TEXTS:
            assert await both(url, COMPLETIONS, {"stop": engine.says + "!"}) == (
                engine.says,
                ("length", None),
            )
