"""A play in which everything happens that a server's metrics tell of: on real sockets, within seconds.

For tests of whoever reads /metrics. The models are tiny and their K/V memory too small for the crowd, so
that requests are preempted, drafted for, cut short, refused and failed as on a bad day of a real server.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import openai

from config import PlannedFault, Settings, load_settings
from engine import Engine
from engine.faults.faulty_engine import FaultyEngine
from engine.loop.engine_parts import EngineLimits, EngineParts, StepRunner
from engine.plan.step_records import StepInputs, StepResult
from engine.startup.build import load_parts
from engine.startup.part_factories import PartFactories
from tests.e2e.http_server import served
from tests.e2e.wire import RawReply, Wire, ask
from tests.support.native import WITHOUT_KERNELS
from tests.support.repetitive_world import WORDS, save_repetitive_model
from tests.support.speculated import single_threaded
from tests.support.tiny_models import save_tiny_model

MODEL, RECURRENT_MODEL = "tiny-llama", "tiny-mamba"  # the label model_name of the two servers
KEYS = ("alice-key", "bob-key")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUEUE_TIMEOUT_S = 2.0
MAX_QUEUED = 12
FAULTS = (
    PlannedFault("tokenize_raise"),
    PlannedFault("forward_raise", at=3),
    PlannedFault("logits_nan", at=12),
    PlannedFault("detokenize_raise", at=25),
    PlannedFault("draft_raise", at=2),
    PlannedFault("draft_out_of_vocab", at=3),
)
MODES = ("swap", "recompute")
FAULTY_STAGES = ("tokenizer", "forward", "sampler", "detokenizer", "drafter")
MAX_TRIES = 20  # of an act whose outcome hangs on what runs beside what

_COMMON = (
    *("--dtype", "float32", "--max-model-len", "96", "--kv-block-size", "4", "--max-num-seqs", "8"),
    *("--api-key", KEYS[0], "--api-key", KEYS[1], "--queue-timeout", str(QUEUE_TIMEOUT_S)),
    *("--max-queued-requests", str(MAX_QUEUED), "--draft-length-policy", "fixed"),
    *("--min-acceptance-rate", "0", "--num-speculative-tokens", "4", "--speculation-schedule", "async"),
)
# Two requests and a half fit the device, and half a one the host.
_TIGHT = ("--num-kv-blocks", "40", "--preemption", "swap", "--swap-space", "16KiB")


@dataclass(frozen=True)
class Scenario:
    """Two running servers: `urls` are what to scrape, the main one's first, at /metrics without a key.

    The second serves a recurrent model, which cannot be drafted for.
    """

    urls: tuple[str, str]
    engines: tuple[Engine, Engine]
    runner: StagedRunner

    async def play(self) -> None:
        """Every act once, in some eight seconds. The servers answer on afterwards, but take no requests.

        Raises AssertionError when something does not come as it must.
        """
        await self.fail()
        await self.talk()
        await self.batch()
        await self.draft()
        await self.press()
        await self.hold_up()
        await self.cut_short()
        await self.drain()

    async def keep_busy(self, seconds: float) -> None:
        """Crowd after crowd under pressure, drafts included, for so long; before `play`, or without it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await self._crowd()

    # The acts.

    async def fail(self) -> None:
        """Requests until all that is planned to go wrong has done so."""
        metrics = self.engines[0].metrics

        async def ask_for_trouble() -> None:
            assert (await self._post(prompt="read me", max_tokens=30)).status in (200, 500)

        def to_come() -> list[str]:
            stages = [stage for stage in FAULTY_STAGES if not metrics.engine_errors[stage]]
            return stages if metrics.speculation.dropped["error"] else [*stages, "a draft of no use"]

        await _until_none(to_come, ask_for_trouble)

    async def talk(self) -> None:
        """Requests that go well, of two tenants, and some that are refused for what they ask."""
        url = self.urls[0]
        for key in KEYS:
            for fields in ({}, {}, {"n": 3, "temperature": 1.0}, {"stop": ["$"]}, {"unheard_of": 1}):
                await self._say(key=key, **fields)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
        assert (await ask(url, "POST", CHAT, chat, _headers())).status == 200
        assert (await ask(url, "POST", COMPLETIONS, {"prompt": 1.5}, _headers())).status == 400
        assert (await ask(url, "POST", COMPLETIONS, {"prompt": "a"})).status == 401
        assert (await ask(url, "GET", "/nowhere", None, _headers())).status == 404
        recurrent = {"prompt": [5, 6, 7], "max_tokens": 8}
        assert (await ask(self.urls[1], "POST", COMPLETIONS, recurrent, _headers())).status == 200

    async def batch(self) -> None:
        """A job of two lines, of which one is refused."""
        bodies = (_body(), _body(temperature=9))
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body})
            for i, body in enumerate(bodies)
        ]
        async with openai.AsyncOpenAI(base_url=f"{self.urls[1]}/v1", api_key=KEYS[0]) as client:
            file = await client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            async with asyncio.timeout(20):
                while batch.status != "completed":
                    await asyncio.sleep(0.01)
                    batch = await client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None and (counts.completed, counts.failed) == (1, 1)

    async def draft(self) -> None:
        """Drafts of every method, right and wrong, in time and too late."""
        stats = self.engines[0].metrics.speculation
        seeds = count()

        async def ask_for_drafts() -> None:
            fields: dict[str, Any] = {"seed": next(seeds), "temperature": 0.5, "max_tokens": 40}
            reply = (await self._say(**fields, return_token_ids=True)).json()["choices"][0]
            text, token_ids = reply["text"], reply["token_ids"]
            guess = {"type": "content", "content": text[:20] + "!" + text[20:]}
            await self._say(**fields, prediction=guess)
            # By turns so that n-grams are soon right and a draft model soon wrong.
            fields |= {"temperature": 0.5 * (fields["seed"] % 2), "max_tokens": 50}
            fields["prompt"] = token_ids[:20] * 2
            wishes = [{"method": method} for method in ("ngram", "suffix", "draft-model")]
            await asyncio.gather(*(self._say(**fields, speculation=wish) for wish in wishes))
            await self._stop_amid_drafts(fields)

        def to_come() -> list[str]:
            methods = ("ngram", "suffix", "prediction", "draft_model")
            counts = {f"{method}, right": stats.accepted[method] for method in methods}
            counts |= {f"{each}, wrong": stats.proposed[each] - stats.accepted[each] for each in methods}
            counts |= {"hit": stats.run_ahead["hit"], "miss": stats.run_ahead["miss"]}
            counts |= {reason: stats.dropped[reason] for reason in ("stale", "late", "cancelled")}
            return [what for what, count in counts.items() if not count]

        await _until_none(to_come, ask_for_drafts)

    async def _stop_amid_drafts(self, fields: dict[str, Any]) -> None:
        """Ask twice, and have the second reply end at a token of the first, which no drafter foresees.

        Its steps take long, so that by then there are drafts of what would follow.
        """
        reply = (await self._say(**fields, return_token_ids=True)).json()["choices"][0]
        self.runner.pace_s = 0.01
        await self._say(
            **fields, stop_token_ids=reply["token_ids"][20:21], speculation={"method": "draft-model"}
        )
        self.runner.pace_s = 0.0

    async def press(self) -> None:
        """More requests at once than fit the memory."""
        preemptions = self.engines[0].metrics.preemptions
        await _until_none(lambda: [mode for mode in MODES if not preemptions[mode]], self._crowd)

    async def hold_up(self) -> None:
        """A step that takes long, while the queue fills up and one in it gives up."""
        rejected = self.engines[0].metrics.requests_rejected
        with self.runner.held():
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(self._post(max_tokens=4)) for _ in range(8 + MAX_QUEUED + 4)]
                async with asyncio.timeout(20):
                    while not (rejected["queue_full"] and rejected["queue_timeout"]):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                self.runner.go_on()
        assert {task.result().status for task in waiting} == {200, 503}

    async def cut_short(self) -> None:
        """A cancel, a client that leaves, a deadline that passes and one that cannot be met."""
        metrics = self.engines[0].metrics
        with self.runner.held():
            cancelled, late = self._begin("to-cancel"), self._begin("too-late")
            wire = await Wire.connect(self.urls[0])
            await wire.send("POST", COMPLETIONS, json.dumps(_body(max_tokens=80)).encode(), _headers())
            await self._until_open(3)
            await wire.close()
            path = "/v1/requests/to-cancel/cancel"
            assert (await ask(self.urls[0], "POST", path, {}, _headers())).status == 200
            path = "/v1/requests/too-late"
            await ask(self.urls[0], "PATCH", path, {"deadline_ms": 1}, _headers())
            assert (await late).status == 504
            self.runner.go_on()
        assert (await cancelled).json()["choices"][0]["finish_reason"] == "abort"
        assert (await self._post(deadline_ms=1)).status == 504
        await self._until_open(0)
        assert metrics.request_aborts["disconnect"] and metrics.request_aborts["cancel"]

    async def drain(self) -> None:
        """Orders to end: one request is refused, one cut off."""
        self.runner.pace_s = 0.05
        running = self._begin("to-drain")
        await self._until_open(1)
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.drain(0.2))
            await asyncio.sleep(0)
            assert (await self._post()).status == 503
        assert (await running).status == 503

    # What they are made of.

    async def _post(self, key: str = KEYS[0], **fields: Any) -> RawReply:
        return await ask(self.urls[0], "POST", COMPLETIONS, _body(**fields), _headers(key))

    async def _say(self, **fields: Any) -> RawReply:
        reply = await self._post(**fields)
        assert reply.status == 200, reply.body
        return reply

    def _begin(self, name: str) -> asyncio.Task[RawReply]:
        headers = {**_headers(), "x-request-id": name}
        return asyncio.create_task(ask(self.urls[0], "POST", COMPLETIONS, _body(max_tokens=80), headers))

    async def _crowd(self) -> None:
        """As many as may wait, each of a third of the memory and with a prompt of its own."""
        prompts = [[WORDS[(number + i * i) % len(WORDS)] for i in range(12)] for number in range(MAX_QUEUED)]
        replies = await asyncio.gather(*(self._post(prompt=prompt, max_tokens=40) for prompt in prompts))
        assert {reply.status for reply in replies} <= {200, 500, 503}  # planned faults; a wait too long

    async def _until_open(self, count: int) -> None:
        """Return once so many requests run and wait."""
        engine = self.engines[0]
        async with asyncio.timeout(20):
            while (now := engine.gauges()).num_requests_running + now.num_requests_waiting != count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


def _headers(key: str = KEYS[0]) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _body(**fields: Any) -> dict[str, Any]:
    prompt = [WORDS[i * i % len(WORDS)] for i in range(14)]
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}


async def _until_none(to_come: Callable[[], list[str]], act: Callable[[], Awaitable[None]]) -> None:
    """Act until nothing is left to come: on threads, nobody can say how often that takes."""
    for _ in range(MAX_TRIES):
        await act()
        if not to_come():
            return
    raise AssertionError(f"after {MAX_TRIES} tries there is still no {', '.join(to_come())}")


class StagedRunner:
    """A runner that can be held up and slowed down; told so by the event loop's thread."""

    def __init__(self) -> None:
        self._runner: StepRunner | None = None
        self._go = threading.Event()
        self._go.set()
        self.pace_s = 0.0  # the least that a step takes

    def stage(self, runner: StepRunner) -> None:
        """This is the one."""
        self._runner = runner

    @contextmanager
    def held(self) -> Iterator[None]:
        """Steps do not end in here until `go_on`."""
        self._go.clear()
        try:
            yield
        finally:
            self.go_on()

    def go_on(self) -> None:
        """Let steps end."""
        self._go.set()

    def run(self, inputs: StepInputs) -> StepResult:
        """As the runner does, later."""
        time.sleep(self.pace_s)
        assert self._go.wait(60) and self._runner is not None
        return self._runner.run(inputs)


@asynccontextmanager
async def scenario(directory: Path) -> AsyncIterator[Scenario]:
    """Both servers, in this process and on this event loop, until it is left; the models go to `directory`.

    ::

        async with scenario(tmp_path) as show:
            ...                          # begin to scrape show.urls
            await show.keep_busy(5)      # for rates over a window
            await show.play()            # everything once

    Each has been asked for something while it was loading. PyTorch computes with one thread meanwhile.
    """
    target = save_repetitive_model(directory / "target")
    near = save_repetitive_model(directory / "near", noise=0.04)
    mamba = save_tiny_model("mamba", directory / "mamba")
    state = ("--state-dir", str(directory / "state"))
    common = (*_COMMON, "--draft-model", str(near))
    with single_threaded():
        main = load_settings(
            [str(target), "--served-model-name", MODEL, *common, *_TIGHT], environ=WITHOUT_KERNELS
        )
        other = load_settings(
            [str(mamba), "--served-model-name", RECURRENT_MODEL, *common, *state],
            environ=WITHOUT_KERNELS,
        )
        async with _server(main, FAULTS) as first, _server(other) as second:
            yield Scenario((first[0], second[0]), (first[1], second[1]), first[2])


@asynccontextmanager
async def _server(
    settings: Settings, faults: Sequence[PlannedFault] = ()
) -> AsyncIterator[tuple[str, Engine, StagedRunner]]:
    runner = StagedRunner()

    def load(*factories: PartFactories) -> EngineParts:
        parts = load_parts(settings, *factories)
        runner.stage(parts.runner)
        return replace(parts, runner=runner)

    limits = EngineLimits(max_queued_requests=MAX_QUEUED, queue_timeout_s=QUEUE_TIMEOUT_S)
    engine = FaultyEngine(faults, load, limits)
    async with served(settings, engine) as url:
        assert (await ask(url, "POST", COMPLETIONS, _body(), _headers())).status == 503
        await engine.start()
        try:
            yield url, engine, runner
        finally:
            runner.go_on()
            await engine.stop()
