"""Every point of a fault plan over real sockets: who suffers, who does not, and what is told of it.

The model is a tiny one. Each pass sleeps for a moment, so that requests are sure to share batches.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from config import load_fault_plan, load_settings
from engine import Engine, build_engine
from tests.e2e.http_server import server_url
from tests.e2e.server_process import server_process
from tests.e2e.wire import Wire, ask, events_of
from tests.support.native import WITHOUT_KERNELS
from tests.support.speculated import single_threaded
from tests.support.tiny_models import save_tiny_model

PATH = "/v1/completions"
FLAGS = ("--kv-block-size", "4", "--num-kv-blocks", "256", "--max-num-seqs", "4")
PLAIN = ("--speculative-method", "none")
PAUSE = {"point": "forward_sleep", "count": -1, "seconds": 0.003}
VICTIM = 3  # as an arrival: two neighbours run already


def body_of(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


NEIGHBOURS = (
    body_of("Once upon a time", 60),
    body_of("The quick brown fox", 54, temperature=0.9, seed=7),
)
SUFFERER = body_of("The capital of", 24, temperature=0.8, seed=3)
BODIES = (*NEIGHBOURS, SUFFERER)


@dataclass
class Server:
    """A server with a plan, in this process but behind a socket."""

    url: str
    engine: Engine

    async def figures(self) -> dict[str, float]:
        """What /metrics shows, by name and labels as they stand there."""
        page = (await ask(self.url, "GET", "/metrics")).body.decode()
        lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return {
            re.sub(r'model_name="[^"]*",|,?model_name="[^"]*"', "", name): float(value)
            for name, value in lines
        }

    async def figure(self, name: str, labels: str = "") -> float:
        figures = await self.figures()
        return figures[f"slipstream_{name}{{{labels}}}"]

    async def errors(self) -> dict[str, int]:
        """How often what stage failed."""
        figures = await self.figures()
        found = {name: re.match(r'slipstream_engine_errors_total{stage="(\w+)"}', name) for name in figures}
        return {match[1]: int(figures[name]) for name, match in found.items() if match and figures[name]}

    async def until_accepted(self, number: int) -> None:
        """Return when so many requests have been accepted."""
        async with asyncio.timeout(30):
            while self.engine.metrics.requests_started < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def used_blocks(self) -> int:
        """Blocks that somebody holds, once nobody runs any more."""
        async with asyncio.timeout(10):
            while await self.figure("num_requests_running"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return int(await self.figure("kv_cache_blocks", 'state="used"'))


@dataclass(frozen=True)
class Outcome:
    """What a client read: the text of a stream or of a reply, and the error that ended it."""

    status: int
    text: str
    error: dict[str, Any] | None


async def stream(url: str, body: dict[str, Any], begun: asyncio.Event | None = None) -> Outcome:
    """Read a stream to its end; `begun` is set at its first byte."""
    wire = await Wire.connect(url)
    try:
        await wire.send("POST", PATH, json.dumps({**body, "stream": True}).encode())
        status, headers = await wire.head()
        if begun is not None:
            begun.set()
        if status != 200:
            reply = json.loads(await wire.reader.readexactly(int(headers["content-length"])))
            return Outcome(status, "", reply["error"])
        events = events_of(b"".join(await wire.chunks()))
    finally:
        await wire.close()
    text = "".join(event["choices"][0]["text"] for event in events if event.get("choices"))
    return Outcome(status, text, events[-1].get("error"))


async def whole(url: str, body: dict[str, Any]) -> Outcome:
    """Read a JSON reply."""
    reply = await ask(url, "POST", PATH, body)
    found = reply.json()
    return Outcome(reply.status, "" if "error" in found else found["choices"][0]["text"], found.get("error"))


async def beside_neighbours(url: str, *others: dict[str, Any]) -> list[Outcome]:
    """The neighbours' streams, then those of the others, which arrive while they run."""
    running = []
    for body in NEIGHBOURS:
        begun = asyncio.Event()
        running.append(asyncio.create_task(stream(url, body, begun)))
        await begun.wait()
    running += [asyncio.create_task(stream(url, body)) for body in others]
    return list(await asyncio.wait_for(asyncio.gather(*running), 60))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("faults") / "model")


@asynccontextmanager
async def serving(
    model: Path, *plan: dict[str, Any], flags: tuple[str, ...] = PLAIN
) -> AsyncIterator[Server]:
    """A server of the model with this plan, which answers to the end."""
    settings = load_settings([str(model), *FLAGS, *flags], environ=WITHOUT_KERNELS)
    environ = {"SLIPSTREAM_ALLOW_FAULTS": "1", "SLIPSTREAM_FAULT_PLAN": json.dumps([PAUSE, *plan])}
    engine = build_engine(settings, load_fault_plan(environ).faults)
    await engine.start()
    try:
        async with server_url(engine) as url:
            yield Server(url, engine)
            assert (await ask(url, "GET", "/health")).status == 200
    finally:
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def texts(model: Path) -> tuple[str, ...]:
    return await right_texts(model)


async def right_texts(model: Path) -> tuple[str, ...]:
    """The text of each body, from a server that has no plan at all."""
    engine = build_engine(load_settings([str(model), *FLAGS, *PLAIN], environ=WITHOUT_KERNELS))
    await engine.start()
    async with server_url(engine) as url:
        outcomes = [await whole(url, body) for body in BODIES]
    await engine.stop()
    assert type(engine) is Engine and all(outcome.error is None for outcome in outcomes)
    return tuple(outcome.text for outcome in outcomes)


async def assert_unharmed(server: Server, texts: tuple[str, ...], outcomes: list[Outcome]) -> None:
    """The neighbours have their own text, and so has who comes later; no block is held."""
    assert [outcome.error for outcome in outcomes[:2]] == [None, None]
    assert tuple(outcome.text for outcome in outcomes[:2]) == texts[:2]
    assert await whole(server.url, SUFFERER) == Outcome(200, texts[2], None)
    assert await server.used_blocks() == 0
    started = sum(
        value
        for name, value in (await server.figures()).items()
        if name.startswith("slipstream_requests_total{")
    )
    assert started == len(outcomes) + 1


def assert_failed(outcome: Outcome, stage: str, text: str, *, at: int) -> None:
    """It ended at its `at`-th token: with a status if nothing had been sent, else with an event."""
    assert outcome.error is not None
    assert (outcome.error["type"], outcome.error["code"]) == ("server_error", f"{stage}_failed")
    assert "0x" not in outcome.error["message"] and "/" not in outcome.error["message"]
    assert outcome.status == (500 if at == 1 else 200)
    assert text.startswith(outcome.text)
    assert bool(outcome.text) == (at > 1)


# One request's own faults.

ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("logits_nan", "sampler", {}),
    ("sampler_raise", "sampler", {}),
    ("sampler_raise", "sampler", {"logprobs": 2}),
    ("sampler_raise", "sampler", {"temperature": 0, "logit_bias": {"5": -3}}),
    ("detokenize_raise", "detokenizer", {}),
    ("detokenize_raise", "detokenizer", {"stop": ["never to be seen"]}),
)


@pytest.mark.by_default("9")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("at", [1, 9])
async def test_a_row_or_a_text_that_fails_ends_its_request_alone(
    at: int, model: Path, texts: tuple[str, ...]
) -> None:
    plan = [{"point": point, "request": VICTIM + i, "at": at} for i, (point, _, _) in enumerate(ROWS)]
    async with serving(model, *plan) as server:
        neighbours = asyncio.create_task(beside_neighbours(server.url))
        await server.until_accepted(2)
        for number, (_, stage, fields) in enumerate(ROWS):
            body = {**SUFFERER, **fields}
            outcome = await (stream if at > 1 or number % 2 else whole)(server.url, body)
            assert_failed(outcome, stage, texts[2] if "logit_bias" not in fields else outcome.text, at=at)
        outcomes = await neighbours
        assert await server.errors() == {"sampler": 4, "detokenizer": 2}
        assert await server.figure("requests_total", 'finish_reason="error"') == len(ROWS)
        await assert_unharmed(server, texts, [*outcomes, *([outcome] * len(ROWS))])


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_request_the_hit_picks_one_of_a_batch(model: Path, texts: tuple[str, ...]) -> None:
    async with serving(model, {"point": "sampler_raise", "at": 40}) as server:
        outcomes = await beside_neighbours(server.url, SUFFERER)
        assert sum(outcome.error is not None for outcome in outcomes) == 1
        right = [outcome.text for outcome in outcomes if outcome.error is None]
        assert [text for text in texts if text in right] == right
        assert await server.errors() == {"sampler": 1}
        assert await server.used_blocks() == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_fail_alone_among_drafts_and_forks(model: Path, texts: tuple[str, ...]) -> None:
    plan = [
        {"point": "sampler_raise", "request": VICTIM, "at": 3},
        {"point": "logits_nan", "request": VICTIM + 1, "at": 2},
    ]
    async with serving(model, *plan, flags=()) as server:
        outcomes = await beside_neighbours(server.url, {**SUFFERER, "n": 2}, SUFFERER)
        assert [outcome.error is None for outcome in outcomes] == [True, True, False, False]
        assert await server.errors() == {"sampler": 2}
        await assert_unharmed(server, texts, outcomes)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tokenizer_that_fails_costs_its_request_alone(model: Path, texts: tuple[str, ...]) -> None:
    plan: list[dict[str, Any]] = [
        {"point": "tokenize_raise", "request": VICTIM},
        {"point": "tokenize_raise", "at": 5},
    ]
    async with serving(model, *plan) as server:
        outcomes = await beside_neighbours(server.url, SUFFERER)
        assert_failed(outcomes.pop(), "tokenizer", "", at=1)
        assert (await whole(server.url, SUFFERER)).text == texts[2]
        reply = await ask(server.url, "POST", "/tokenize", {"prompt": "The quick"})
        assert (reply.status, reply.json()["error"]["code"]) == (500, "tokenizer_failed")
        assert (await ask(server.url, "POST", "/tokenize", {"prompt": "The quick"})).status == 200
        assert await server.errors() == {"tokenizer": 2}
        await assert_unharmed(server, texts, [*outcomes, outcomes[0]])


# Passes.


@pytest.mark.asyncio(loop_scope="module")
async def test_one_pass_that_fails_harms_nobody(model: Path, texts: tuple[str, ...]) -> None:
    async with serving(model, {"point": "forward_raise", "request": 2, "at": 20}) as server:
        outcomes = await beside_neighbours(server.url, SUFFERER)
        assert outcomes[2] == Outcome(200, texts[2], None)
        assert await server.errors() == {"forward": 1}
        assert await server.figure("forward_faults_total", 'blamed="request"') == 0
        await assert_unharmed(server, texts, outcomes)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_makes_every_pass_with_it_fail_ends_alone_among_sixteen(
    model: Path, texts: tuple[str, ...]
) -> None:
    plan = {"point": "forward_raise", "request": 9, "at": 6, "count": -1}
    async with serving(model, plan, flags=(*PLAIN, "--max-num-seqs", "16")) as server:
        bodies = [BODIES[number % 3] for number in range(16)]
        running = []
        for number, body in enumerate(bodies):
            running.append(asyncio.create_task(stream(server.url, body)))
            await server.until_accepted(number + 1)
        outcomes = await asyncio.gather(*running)
        assert_failed(outcomes.pop(8), "forward", texts[8 % 3], at=6)
        right = [texts[number % 3] for number in range(16) if number != 8]
        assert outcomes == [Outcome(200, text, None) for text in right]
        assert await server.figure("forward_faults_total", 'blamed="request"') == 1
        assert await server.figure("forward_faults_total", 'blamed="batch"') == 0
        assert await server.errors() == {"forward": 1}
        assert await server.used_blocks() == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_two_failed_passes_in_a_row_are_no_death(model: Path, texts: tuple[str, ...]) -> None:
    async with serving(model, {"point": "forward_raise", "count": 2}) as server:
        for _ in range(2):
            assert_failed(await whole(server.url, SUFFERER), "forward", texts[2], at=1)
        assert await whole(server.url, SUFFERER) == Outcome(200, texts[2], None)
        assert await server.errors() == {"forward": 2}
        assert await server.used_blocks() == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_out_of_memory_is_tried_again_with_fewer(model: Path, texts: tuple[str, ...]) -> None:
    plan: list[dict[str, Any]] = [
        {"point": "forward_oom", "request": VICTIM, "every": 7, "count": 3},
        {"point": "forward_oom"},
    ]
    async with serving(model, *plan) as server:
        outcomes = await beside_neighbours(server.url, SUFFERER)
        assert outcomes[2] == Outcome(200, texts[2], None)
        assert await server.errors() == {"forward": 4}
        assert await server.figure("preemptions_total", 'mode="recompute"') >= 3
        await assert_unharmed(server, texts, outcomes)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_lone_token_that_finds_no_room_is_tried_again(model: Path, texts: tuple[str, ...]) -> None:
    async with serving(model, {"point": "forward_oom", "at": 4}) as server:
        assert await whole(server.url, SUFFERER) == Outcome(200, texts[2], None)
        assert await server.errors() == {"forward": 1}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pass_that_takes_long_holds_up_tokens_and_nothing_else(
    model: Path, texts: tuple[str, ...]
) -> None:
    plan = {"point": "forward_sleep", "request": VICTIM, "at": 5, "seconds": 1.5}
    async with serving(model, plan) as server:
        start = time.perf_counter()
        running = asyncio.create_task(beside_neighbours(server.url, SUFFERER))
        slowest = 0.0
        while not running.done():
            asked = time.perf_counter()
            assert (await ask(server.url, "GET", "/health")).status == 200
            slowest = max(slowest, time.perf_counter() - asked)
            await asyncio.sleep(0.02)
        outcomes = await running
        assert time.perf_counter() - start > 1.5 > slowest
        assert outcomes[2] == Outcome(200, texts[2], None)
        assert await server.errors() == {}
        await assert_unharmed(server, texts, outcomes)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_with_states_keeps_what_is_not_at_fault(tmp_path: Path) -> None:
    model = save_tiny_model("granite_hybrid", tmp_path / "model")
    texts = await right_texts(model)
    plan: list[dict[str, Any]] = [
        {"point": "sampler_raise", "request": VICTIM, "at": 4},
        {"point": "logits_nan", "request": VICTIM + 1, "at": 3},
        {"point": "forward_oom", "request": VICTIM, "at": 2},
    ]
    async with serving(model, *plan) as server:
        outcomes = await beside_neighbours(server.url, SUFFERER, SUFFERER)
        for outcome in outcomes[2:]:
            assert_failed(outcome, "sampler", texts[2], at=3)
        assert await server.errors() == {"sampler": 2, "forward": 1}
        assert await server.figure("preemptions_total", 'mode="recompute"') >= 3
        await assert_unharmed(server, texts, outcomes)


# Drafts.

DRAFTS: dict[str, tuple[list[dict[str, Any]], dict[str, int]]] = {
    "raise": ([{"point": "draft_raise", "count": -1}], {"drafter": 3}),  # then it is left alone
    "sleep": ([{"point": "draft_sleep", "at": 3, "count": 2, "seconds": 0.2}], {}),
    "garbage": ([{"point": "draft_garbage", "count": -1}], {}),
    "each on one request": (
        [
            {"point": "draft_raise", "request": VICTIM},
            {"point": "draft_out_of_vocab", "request": VICTIM, "at": 4},
            {"point": "draft_too_many", "request": VICTIM, "at": 8},
        ],
        {"drafter": 3},
    ),
}


@pytest.mark.by_default("garbage", "each on one request")
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", DRAFTS)
async def test_drafts_that_go_wrong_cost_speed_only(case: str, model: Path, texts: tuple[str, ...]) -> None:
    plan, errors = DRAFTS[case]
    async with serving(model, *plan, flags=("--speculation-schedule", "sync")) as server:
        outcomes = await beside_neighbours(server.url, SUFFERER)
        assert outcomes[2] == Outcome(200, texts[2], None)
        assert await server.errors() == errors
        if case == "garbage":
            assert await server.figure("spec_decode_num_drafts_total") > 3
        await assert_unharmed(server, texts, outcomes)


# All of it.

CHAOS: tuple[dict[str, Any], ...] = (
    {"point": "forward_raise", "at": 200},
    {"point": "forward_oom", "at": 13, "every": 37},
    {"point": "logits_nan", "at": 50, "every": 701},
    {"point": "sampler_raise", "at": 60, "every": 901},
    {"point": "detokenize_raise", "at": 70, "every": 1103},
    {"point": "tokenize_raise", "at": 9, "every": 17},
    {"point": "draft_raise", "at": 7, "every": 11},
    {"point": "draft_out_of_vocab", "at": 5, "every": 29},
    {"point": "draft_too_many", "at": 3, "every": 31},
    {"point": "draft_garbage", "every": 5},
)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_whatever_goes_wrong_beside_it_a_text_is_right_or_an_error(
    model: Path, texts: tuple[str, ...]
) -> None:
    flags = ("--num-kv-blocks", "70", "--max-num-seqs", "6", "--max-num-batched-tokens", "24")
    order = random.Random(5).choices(range(len(BODIES)), k=48)
    queue = iter(order)
    outcomes: list[tuple[int, Outcome]] = []

    async def client() -> None:
        for index in queue:
            read = stream if len(outcomes) % 3 else whole
            outcomes.append((index, await read(server.url, BODIES[index])))

    async with serving(model, *CHAOS, flags=flags) as server:
        await asyncio.wait_for(asyncio.gather(*(client() for _ in range(8))), 90)
        errors = await server.errors()
        assert await server.used_blocks() == 0
        for index, outcome in outcomes:
            assert outcome.error is not None or outcome.text == texts[index]
            assert texts[index].startswith(outcome.text)
        num_failed = sum(outcome.error is not None for _, outcome in outcomes)
        assert 0 < num_failed < len(order) / 2
        assert set(errors) == {"forward", "sampler", "detokenizer", "tokenizer", "drafter"}
        ended = await server.figure("requests_total", 'finish_reason="error"')
        late = errors["detokenizer"]  # some of these, maybe: their requests had ended well by then
        assert ended <= num_failed - errors["tokenizer"] <= ended + late
        server.engine._loaded.batcher.kv.check_integrity()


# Leaks.


async def leave_early(url: str) -> None:
    """A client that goes after its first byte."""
    wire = await Wire.connect(url)
    await wire.send("POST", PATH, json.dumps({**NEIGHBOURS[0], "stream": True}).encode())
    await wire.head()
    await wire.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_block_is_lost_with_each_abort_and_with_nothing_else(
    model: Path, texts: tuple[str, ...]
) -> None:
    async with serving(model, {"point": "block_leak", "count": -1}) as server:
        for number in range(4):
            assert await server.used_blocks() == number
            assert await whole(server.url, SUFFERER) == Outcome(200, texts[2], None)
            ends_at = {**SUFFERER, "stop": [texts[2][6:8]]}
            assert (await whole(server.url, ends_at)).text == texts[2][: texts[2].index(texts[2][6:8])]
            assert await server.used_blocks() == number
            await leave_early(server.url)
        assert await server.used_blocks() == 4
        async with asyncio.timeout(30):
            while not await server.errors():  # noqa: ASYNC110 - found when there is nothing else to do
                await asyncio.sleep(0.1)
        assert await server.errors() == {"kv": 1}


@pytest.mark.asyncio(loop_scope="module")
async def test_without_the_leak_aborts_lose_nothing(model: Path) -> None:
    async with serving(model) as server:
        for _ in range(3):
            await leave_early(server.url)
        assert await server.used_blocks() == 0
        assert await server.figure("requests_total", 'finish_reason="abort"') == 3


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_without_the_opt_in_ignores_its_plan(model: Path, texts: tuple[str, ...]) -> None:
    plan = [{"point": "tokenize_raise", "count": -1}, {"point": "forward_raise", "count": -1}]
    forbid = ("env", "-u", "SLIPSTREAM_ALLOW_FAULTS")
    async with server_process(model, *FLAGS, *PLAIN, faults=plan, under=forbid) as server:
        await server.until_ready()
        assert await whole(server.url, SUFFERER) == Outcome(200, texts[2], None)
        warnings = [record["event"] for record in server.log if "FAULT_PLAN" in record["event"]]
    assert len(warnings) == 1 and warnings[0].startswith("SLIPSTREAM_FAULT_PLAN is ignored")
