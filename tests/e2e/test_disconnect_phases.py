"""A client that leaves, in each phase of its request: work stops within a step, and nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import pytest

from engine.loop.engine_parts import EngineLimits
from engine.plan.request import FinishReason, Request
from engine.plan.step_records import StepInputs
from tests.e2e.http_server import server_url
from tests.e2e.wire import Wire, ask
from tests.support.engines import EngineShape, Harness, collect, running_engine
from tests.support.fakes import expected_output

PATH = "/v1/completions"
SHARED = [5, 6, 7, 8, 9, 1, 2, 3]  # two blocks that the neighbour has as well
NUM_TOKENS = 6
SHAPE = EngineShape(max_num_batched_tokens=16, prefix_caching=True)

PHASES: dict[str, Callable[[Request], bool]] = {
    "queued": lambda request: request.first_scheduled_time is None,
    "prefill": lambda request: len(SHARED) < request.num_computed_tokens < request.num_prompt_tokens,
    "decode": lambda request: request.num_output_tokens == 2,
    "last token": lambda request: request.num_output_tokens == NUM_TOKENS - 1,
}


class Steps:
    """Lets the model's steps through one by one, then all of them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = threading.Semaphore(0)
        self._is_open = False
        self._begun = asyncio.Event()

    def __call__(self, inputs: StepInputs) -> None:
        self._loop.call_soon_threadsafe(self._begun.set)
        if not self._is_open:
            assert self._turns.acquire(timeout=30)

    async def begun(self) -> None:
        """Wait until a step is held."""
        await asyncio.wait_for(self._begun.wait(), 10)

    async def one(self) -> None:
        """Let the step that is held through, and wait for the next one."""
        self._begun.clear()
        self._turns.release()
        await self.begun()

    def open(self) -> None:
        """Hold none any more."""
        self._is_open = True
        self._turns.release()


async def until(reached: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for what nobody tells."""
    async with asyncio.timeout(timeout_s):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def requests_of(harness: Harness) -> list[Request]:
    return harness.engine._requests.all()


@pytest.mark.parametrize(
    ("stream", "n", "is_draining"), [(False, 1, False), (True, 3, False), (False, 3, True), (True, 1, True)]
)
@pytest.mark.parametrize("phase", PHASES)
async def test_leaving_stops_the_work_within_a_step(
    phase: str, stream: bool, n: int, is_draining: bool
) -> None:
    steps = Steps()
    shape = EngineShape(**{**SHAPE.__dict__, "max_num_seqs": 1 if phase == "queued" else 8})
    async with running_engine(shape, before=steps) as harness, server_url(harness.engine) as url:
        neighbour = harness.submit([*SHARED, 11], max_tokens=60)
        await steps.begun()
        wire = await Wire.connect(url)
        prompt = [*SHARED, *range(20, 60)]
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "n": n, "stream": stream, "temperature": 0}
        await wire.send("POST", PATH, json.dumps(body).encode())
        await until(lambda: len(requests_of(harness)) == 1 + n)
        while not any(PHASES[phase](request) for request in requests_of(harness)[1:]):
            await steps.one()
        drain = asyncio.create_task(harness.engine.drain(30)) if is_draining else None
        await wire.close()
        assert harness.engine._loop is not None
        noted = harness.engine._loop._endings
        open_before = len(requests_of(harness)) - 1
        await until(lambda: len(noted) == open_before, 1)
        await steps.one()
        assert [request.request_id for request in requests_of(harness)] == [neighbour.request_id]
        assert harness.engine.gauges().num_requests_running == 1
        assert harness.engine.gauges().kv_blocks_used <= -(-(len(SHARED) + 61) // shape.block_size)
        steps.open()
        result = await collect(neighbour)
        assert result.token_ids == expected_output([*SHARED, 11], 60)
        assert harness.engine.metrics.request_aborts["disconnect"] == 1
        assert harness.engine.metrics.requests_finished[FinishReason.ABORT] == 1
        if drain is not None:
            await drain


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_prompt_is_read_gives_its_place_back(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    async with (
        running_engine(limits=EngineLimits(max_queued_requests=3)) as harness,
        server_url(harness.engine) as url,
    ):
        tokenizer = harness.parts.tokenizer
        encode = type(tokenizer).encode

        def hold(self: object, text: str, **options: bool) -> list[int]:
            begun.set()
            go.wait(30)
            return [1, 2, 3]

        monkeypatch.setattr(type(tokenizer), "encode", hold)
        wire = await Wire.connect(url)
        body = {"prompt": "abc", "n": 3, "stream": stream}
        await wire.send("POST", PATH, json.dumps(body).encode())
        await asyncio.to_thread(begun.wait, 10)
        refused = await ask(url, "POST", PATH, {"prompt": [1]})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "queue_full")
        await wire.close()
        await until(lambda: harness.engine._admission.num_preparing == 0, 1)
        monkeypatch.setattr(type(tokenizer), "encode", encode)
        assert (await ask(url, "POST", PATH, {"prompt": [1], "max_tokens": 2})).status == 200
        go.set()
    assert harness.engine.metrics.requests_started == 1


async def test_a_crowd_that_leaves_holds_nothing_and_the_next_is_served() -> None:
    shape = EngineShape(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    async with (
        running_engine(shape, before=lambda _: time.sleep(0.002)) as harness,
        server_url(harness.engine) as url,
    ):
        body = {"prompt": SHARED, "max_tokens": 400, "temperature": 0}
        wires = await asyncio.gather(*(Wire.connect(url) for _ in range(200)))
        for index, wire in enumerate(wires):
            await wire.send("POST", PATH, json.dumps({**body, "stream": index % 2 == 0}).encode())
        await asyncio.sleep(0.5)
        await asyncio.gather(*(wire.close() for wire in wires))
        reply = await asyncio.wait_for(ask(url, "POST", PATH, {**body, "max_tokens": 5}), 5)
        assert reply.status == 200
        await until(lambda: not requests_of(harness), 1)
        assert harness.engine.gauges().kv_blocks_used == 0
        metrics = harness.engine.metrics
        assert metrics.requests_finished[FinishReason.ABORT] == metrics.requests_started - 1
