"""Text that fails to be made, in either direction, is one request's end and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar

import pytest

from engine.errors import InvalidRequest, RequestFailed
from engine.loop.stream import RequestStream
from engine.plan.request import FinishReason
from engine.text.detokenizer import TextDelta
from tests.support.engines import Harness, collect, running_engine
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import expected_output

PROMPT = [1, 1]


class Broken:
    """A detokenizer that raises at the token of this number, from 1."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.num_tokens = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_tokens += len(token_ids)
        if self.num_tokens >= self.at:
            raise ValueError("no such bytes")
        return "x" * len(token_ids)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        return TextDelta(self.decode(token_ids), None, len(token_ids))

    def flush(self) -> TextDelta:
        return TextDelta("", None, 0)


def submit_broken(harness: Harness, at: int, monkeypatch: pytest.MonkeyPatch) -> RequestStream:
    stream = harness.submit(PROMPT, max_tokens=10)
    monkeypatch.setattr(stream, "_detokenizer", Broken(at))
    return stream


@pytest.mark.parametrize("at", [1, 5, 10])
async def test_nothing_comes_after_text_that_fails_but_the_error(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine() as harness:
        bad, good = submit_broken(harness, at, monkeypatch), harness.submit([2, 2], max_tokens=10)
        broken, whole = await asyncio.gather(collect(bad), collect(good))
        assert isinstance(broken.finish.error, RequestFailed)
        assert (broken.finish.error.stage, broken.finish.reason) == ("detokenizer", FinishReason.ERROR)
        assert broken.text == "x" * (at - 1)
        assert broken.num_deltas == 1 or at > 1, "nothing shows that it began"
        assert whole.token_ids == expected_output([2, 2], 10)
        assert harness.engine.metrics.engine_errors == {"detokenizer": 1}


async def test_tokens_behind_text_that_fails_are_counted_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = FakeDrafter(method="ngram", alpha=1.0, is_cheap=True)
    async with running_engine(drafters=[drafter]) as harness:
        stream = harness.submit(PROMPT, max_tokens=10, stop=("never",))
        monkeypatch.setattr(stream, "_detokenizer", Broken(at=2))
        broken = await collect(stream)
        metrics = harness.engine.metrics
        assert metrics.speculation.num_accepted > 0, "the second token was not the last of its step"
        assert (broken.finish.reason, broken.finish.num_output_tokens) == (FinishReason.ERROR, 2)
        assert (metrics.generation_tokens, metrics.request_generation_tokens.sum) == (2, 2)


async def test_text_that_fails_after_the_request_has_ended_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_engine() as harness:
        stream = submit_broken(harness, 10, monkeypatch)
        await collect(harness.submit([2, 2], max_tokens=20))
        assert stream.is_finished
        result = await collect(stream)
        assert isinstance(result.finish.error, RequestFailed)
        assert (result.finish.reason, result.num_deltas) == (FinishReason.ERROR, 1)
        assert harness.engine.metrics.engine_errors == {"detokenizer": 1}
        assert len((await collect(harness.submit(PROMPT, max_tokens=10))).token_ids) == 10


async def test_a_tokenizer_that_raises_is_counted_and_costs_its_caller_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_engine() as harness:
        neighbour = harness.submit(PROMPT, max_tokens=10)
        with monkeypatch.context() as patch:
            patch.setattr(harness.parts.tokenizer, "encode", lambda *_, **__: 1 / 0)
            with pytest.raises(RequestFailed, match=r"^the tokenizer failed \(ZeroDivisionError\)$"):
                await harness.engine.text.encode("a")
            with pytest.raises(RequestFailed):
                await harness.engine.text.render_chat([{"role": "user", "content": "a"}])
        with pytest.raises(InvalidRequest):
            await harness.engine.text.encode("\ud800")
        assert harness.engine.metrics.engine_errors == {"tokenizer": 2}, "a refusal is no error of ours"
        assert (await collect(neighbour)).token_ids == expected_output(PROMPT, 10)


class Panic(BaseException):
    """As the libraries in Rust raise."""


async def test_a_panic_is_counted_like_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> None:
        raise Panic("the tokenizer is at its end")

    async with running_engine() as harness:
        with monkeypatch.context() as patch:
            patch.setattr(harness.parts.tokenizer, "encode", panic)
            with pytest.raises(RequestFailed, match=r"^the tokenizer failed \(Panic\)$"):
                await harness.engine.text.encode("a")
        assert await harness.engine.text.encode("a")


async def test_work_on_text_knows_whom_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    label: ContextVar[str] = ContextVar("label", default="nobody")
    async with running_engine() as harness:
        monkeypatch.setattr(harness.parts.tokenizer, "encode", lambda *_, **__: label.get())
        label.set("somebody")
        asked: object = await harness.engine.text.encode("a")
        assert asked == "somebody"
