"""Reading several choices as one, without a socket."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from engine import GenerationRequest, RequestFailed, RequestStream, SamplingParams
from server.api.generation import Choice, Generation, Prompt
from server.api.usage import reply_metrics, reply_usage
from tests.support.fake_engine import FakeEngine


def open_choices(engine: FakeEngine, num_choices: int, max_tokens: int = 5) -> Generation:
    prompt = Prompt([97, 98, 99])
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    streams = [
        cast(RequestStream, engine.submit(GenerationRequest(f"r-{i}", prompt.token_ids, sampling)))
        for i in range(num_choices)
    ]
    return Generation([Choice(i, prompt, stream) for i, stream in enumerate(streams)])


@pytest.mark.parametrize("num_choices", [1, 2, 8])
async def test_choices_take_turns(num_choices: int) -> None:
    generation = open_choices(FakeEngine(), num_choices)
    rounds = [[(await generation.next())[0].index for _ in range(num_choices)] for _ in range(5)]
    assert [sorted(each) for each in rounds] == [list(range(num_choices))] * 5
    assert not generation.is_open
    generation.close()


async def test_a_slow_reader_holds_one_delta_a_choice() -> None:
    engine = FakeEngine()
    generation = open_choices(engine, 3)
    await generation.next()
    for _ in range(50):
        await asyncio.sleep(0)
    assert [stream.num_sent for stream in engine.streams] == [2, 1, 1]
    generation.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_an_interrupted_wait_loses_nothing(num_choices: int) -> None:
    go = asyncio.Event()

    async def gate(_: int) -> None:
        await go.wait()

    generation = open_choices(FakeEngine(gate=gate), num_choices)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await generation.next()
    go.set()
    texts = [""] * num_choices
    while generation.is_open:
        choice, delta = await generation.next()
        texts[choice.index] += delta.text
    assert texts == ["abcab"] * num_choices
    generation.close()


async def test_one_choice_that_fails_ends_them_all() -> None:
    engine = FakeEngine()
    generation = open_choices(engine, 3)
    engine.failure, engine.fail_at = RequestFailed("broken", "forward"), 2
    with pytest.raises(RequestFailed):
        while True:
            await generation.next()
    generation.close()
    generation.close()
    assert engine.num_open == 0


async def test_totals_count_a_prompt_once() -> None:
    generation = open_choices(FakeEngine(), 3)
    while generation.is_open:
        await generation.next()
    generation.close()
    usage = reply_usage(generation.choices)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 15, 18)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    metrics = reply_metrics(generation.choices)
    assert metrics["tokens_per_second"] == 120.0
    assert metrics["mean_itl_ms"] == 5.0
