"""Whatever a drafter does, every request gets its own text, and nothing but drafting suffers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult
from engine.plan.speculation.speculation_config import Schedule
from tests.e2e.http_server import server_url
from tests.e2e.wire import ask
from tests.support.engines import EngineShape, Harness, collect, running_engine
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, expected_output

PROMPTS = ([5, 6, 7, 8, 9], [1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [5, 6, 7])
LENGTH = 24

Spoil = Callable[[DraftJob, Draft], Any]


def changed(**changes: Any) -> Spoil:
    return lambda job, draft: replace(draft, **changes)


SPOILS: dict[str, Spoil] = {
    "wrong tokens": changed(token_ids=(1,)),
    "out of vocabulary": changed(token_ids=(VOCAB_SIZE,)),
    "negative": changed(token_ids=(-1,)),
    "too many": lambda job, draft: replace(draft, token_ids=(1,) * (job.num_wanted + 1)),
    "wrong position": lambda job, draft: replace(draft, first=draft.first + 1, token_ids=(1,)),
    "wrong epoch": lambda job, draft: replace(draft, epoch=draft.epoch + 1),
    "unknown request": changed(request_id="nobody"),
    "no answer": lambda job, draft: None,
    "a string for a token": changed(token_ids=("1",)),
    "numpy tokens": changed(token_ids=(np.int64(1),)),
    "a list of tokens": changed(token_ids=[1]),
    "an array of tokens": changed(token_ids=np.array([1])),
    "no tokens at all": changed(token_ids=None),
    "a tree with bad parents": changed(token_ids=(1, 2), parents=(0, 5)),
    "a tree elsewhere": lambda job, draft: replace(draft, first=0, token_ids=(1,), parents=(-1,)),
    "for ever behind": changed(token_ids=(), is_behind=True),
    "distributions of nothing": changed(probs=(None, None)),
}
HARMLESS = {"wrong tokens", "for ever behind"}

RESULTS: dict[str, Callable[[DraftResult], object]] = {
    "None": lambda result: None,
    "drafts that are None": lambda result: replace(result, drafts=None),  # type: ignore[arg-type]
    "drafts in a list": lambda result: replace(result, drafts=list(result.drafts)),  # type: ignore[arg-type]
    "no time": lambda result: replace(result, draft_s=None),  # type: ignore[arg-type]
    "an exception": lambda result: ValueError("returned, not raised"),
}

WAYS: dict[str, tuple[Schedule, bool]] = {
    "sync": ("sync", False),
    "async": ("async", False),
    "auto": ("auto", False),
    "on the spot": ("auto", True),
}


async def generate(harness: Harness) -> None:
    """Requests beside each other: each gets its text."""
    streams = [harness.submit(prompt, LENGTH) for prompt in PROMPTS]
    results = await asyncio.wait_for(asyncio.gather(*map(collect, streams)), 20)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == expected_output(prompt, LENGTH)
        assert result.finish.num_output_tokens == LENGTH


def errors_of(harness: Harness) -> int:
    return harness.engine.metrics.engine_errors["drafter"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[EngineShape, bool]:
    schedule, is_cheap = WAYS[request.param]
    return EngineShape(schedule=schedule), is_cheap


@pytest.mark.by_default
@pytest.mark.parametrize("fault", SPOILS)
async def test_absurd_answers(fault: str, way: tuple[EngineShape, bool]) -> None:
    shape, is_cheap = way
    drafter = FakeDrafter(alpha=1.0, is_cheap=is_cheap, spoil=SPOILS[fault])
    async with running_engine(shape, drafters=[drafter]) as harness:
        await generate(harness)
        if shape.schedule == "sync" and fault not in HARMLESS:
            assert errors_of(harness) >= 3
        if fault in HARMLESS:
            assert errors_of(harness) == 0


@pytest.mark.parametrize("fault", RESULTS)
async def test_absurd_results(fault: str, way: tuple[EngineShape, bool]) -> None:
    shape, is_cheap = way
    drafter = FakeDrafter(alpha=1.0, is_cheap=is_cheap, mangle=RESULTS[fault])
    async with running_engine(shape, drafters=[drafter]) as harness:
        await generate(harness)
        if shape.schedule == "sync":
            assert errors_of(harness) == 3, "after three it is left alone"


class Fail:
    """Raises the first `count` times."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, jobs: Sequence[DraftJob]) -> None:
        if self.left:
            self.left -= 1
            raise RuntimeError("injected")


@pytest.mark.parametrize("count", [1, 10_000], ids=["once", "always"])
async def test_a_drafter_that_raises(count: int, way: tuple[EngineShape, bool]) -> None:
    shape, is_cheap = way
    drafter = FakeDrafter(alpha=1.0, is_cheap=is_cheap, before=Fail(count))
    async with running_engine(shape, drafters=[drafter]) as harness:
        for _ in range(3):
            await generate(harness)
        if shape.schedule == "sync":
            assert errors_of(harness) == min(count, 3)
            assert harness.engine.metrics.speculation.num_accepted > 0 or count > 1


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs, hangs until the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.by_default("async")
@pytest.mark.parametrize("schedule", ["sync", "async", "auto"])
async def test_a_drafter_that_hangs_and_a_stop_all_the_same(
    schedule: Schedule, gate: threading.Event
) -> None:
    drafter = FakeDrafter(alpha=1.0, before=lambda jobs: gate.wait(60))
    async with running_engine(EngineShape(schedule=schedule), drafters=[drafter]) as harness:
        for _ in range(10):
            await generate(harness)
        assert drafter.num_calls <= 1
        stream = harness.submit([1, 2, 3], 100)
        await anext(stream)
        start = time.perf_counter()
        await harness.engine.stop()
        assert time.perf_counter() - start < 2


async def test_one_that_hangs_does_not_keep_cheap_ones_from_drafting(gate: threading.Event) -> None:
    hung = FakeDrafter(before=lambda jobs: gate.wait(60))
    cheap = FakeDrafter(method="ngram", alpha=1.0, is_cheap=True, is_stepwise=False)
    async with running_engine(EngineShape(schedule="sync"), drafters=[hung, cheap]) as harness:
        await generate(harness)
        await generate(harness)
        assert harness.engine.metrics.speculation.accepted["ngram"] > 0


async def test_a_drafter_that_lags_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.run_ahead._PATIENCE_S", 0.02)
    drafter = FakeDrafter(alpha=1.0, before=lambda jobs: time.sleep(0.2))
    async with running_engine(EngineShape(schedule="sync"), drafters=[drafter]) as harness:
        start = time.perf_counter()
        while drafter.num_calls < 4:
            await generate(harness)
        seconds = time.perf_counter() - start
        steps = harness.runner.num_steps
        assert steps > 50, "the target goes on"
        assert seconds < 0.2 * 4 + 5
        assert errors_of(harness) == 0


async def test_what_happens_is_told(way: tuple[EngineShape, bool]) -> None:
    shape, is_cheap = way
    drafter = FakeDrafter(alpha=0.7, is_cheap=is_cheap, spoil=SPOILS["too many"])
    async with running_engine(shape, drafters=[drafter]) as harness, server_url(harness.engine) as url:
        body = {"prompt": PROMPTS[0], "max_tokens": LENGTH, "temperature": 0, "return_token_ids": True}
        reply = await ask(url, "POST", "/v1/completions", body)
        page = (await ask(url, "GET", "/metrics")).body.decode()
        assert reply.json()["choices"][0]["token_ids"] == expected_output(PROMPTS[0], LENGTH)
        assert reply.json()["usage"]["completion_tokens"] == LENGTH
        assert (await ask(url, "GET", "/health")).status == 200
    errors = [line for line in page.splitlines() if "errors" in line and 'drafter"' in line]
    if shape.schedule == "sync":
        assert [float(line.split()[-1]) for line in errors] == [3.0], page


# What speculation must not change.


@pytest.mark.parametrize("schedule", ["sync", "async"])
@pytest.mark.parametrize("place", [3, 4, 5, 6, 7])
async def test_a_stop_string_ends_text_tokens_and_counts_where_it_does_without_drafts(
    place: int, schedule: Schedule
) -> None:
    outcomes = []
    drafter = FakeDrafter(alpha=1.0, is_stepwise=False)
    shape = EngineShape(schedule=schedule, max_draft_tokens=8)
    for drafters in ([], [drafter]):
        async with running_engine(shape, drafters=drafters) as harness:
            tokens = expected_output(PROMPTS[0], LENGTH)
            stop = await harness.engine.text.decode(tokens[place : place + 1], skip_special_tokens=False)
            neighbour = harness.submit(PROMPTS[2], LENGTH)
            for min_tokens in (0, 5):
                stream = harness.submit(PROMPTS[0], LENGTH, stop=(stop,), min_tokens=min_tokens)
                result = await collect(stream)
                finish = result.finish
                outcomes.append(
                    (
                        result.text,
                        result.token_ids,
                        finish.reason,
                        finish.stop_reason,
                        finish.num_output_tokens,
                    )
                )
                assert len(result.token_ids) == finish.num_output_tokens
            assert (await collect(neighbour)).token_ids == expected_output(PROMPTS[2], LENGTH)
    assert outcomes[:2] == outcomes[2:]
    assert drafter.num_calls > 0


@pytest.mark.parametrize("num_bursts", [20, pytest.param(67, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["sync", "async", "auto"])
async def test_ten_thousand_cancels_leave_nothing(schedule: Schedule, num_bursts: int) -> None:
    """Of 67 bursts for each of three schedules."""
    drafters = [FakeDrafter(alpha=1.0), FakeDrafter(method="ngram", alpha=0.5, is_cheap=True, is_shy=True)]
    shape = EngineShape(schedule=schedule, max_num_seqs=64, num_blocks=600, max_num_batched_tokens=512)
    async with running_engine(shape, drafters=drafters, inline=True) as harness:
        harness.runner.instant = True
        for number in range(num_bursts):
            streams = [harness.submit([1, 2, 3, number % 200], 100) for _ in range(50)]
            for _ in range(number % 12):
                await asyncio.sleep(0)
            for stream in streams:
                stream.close()
            if number % 5 == 0:
                await collect(harness.submit([7], 2))
        await collect(harness.submit([7], 2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert harness.engine.gauges().kv_blocks_used == 0
        assert not any(drafter.known for drafter in drafters)
        assert not any(drafter.violations for drafter in drafters)
        assert errors_of(harness) == 0
        assert sum(drafter.num_drafted for drafter in drafters) > 0


@pytest.mark.slow
def test_a_process_with_a_hung_drafter_ends() -> None:
    program = """
        import asyncio, threading, time
        from tests.support.engines import EngineShape, collect, running_engine
        from tests.support.fake_drafters import FakeDrafter
        from tests.support.fakes import expected_output

        async def main() -> None:
            begun = threading.Event()
            def before(jobs: object) -> None:
                begun.set()
                threading.Event().wait()
            drafters = [FakeDrafter(before=before)]
            async with running_engine(EngineShape(schedule="async"), drafters=drafters) as harness:
                result = await collect(harness.submit([1, 2, 3], 50))
                assert result.token_ids == expected_output([1, 2, 3], 50)
                begun.wait(10)
                global start
                start = time.perf_counter()

        asyncio.run(main())
        print("stopped" if time.perf_counter() - start < 2 else "late", flush=True)
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")
    assert time.perf_counter() - start < 60
