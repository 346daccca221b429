"""Whole engines that are launched ahead and go wrong by plans drawn from seeds, held against a sound one.

The model is tiny and what is launched is played back on a CPU; everything else is real. No thread runs beside
another, so that a seed gives the same run again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from config import FaultPoint, PlannedFault, load_settings
from config.fault_plan import ALWAYS
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.faults.faulty_ahead_runner import FaultyAheadRunner
from engine.faults.faulty_engine import FaultyEngine
from engine.loop.engine_parts import (
    AheadRunner,
    EngineLimits,
    EngineParts,
    EngineState,
    Executors,
    StepRunner,
)
from engine.plan.request import FinishReason
from engine.startup.build import load_parts
from engine.startup.build_runner import RunnerSizes
from engine.startup.part_factories import PartFactories
from tests.support.ahead_asks import StepCount, adjusted_families, plain_families
from tests.support.engines import InlineExecutor
from tests.support.native import WITHOUT_KERNELS
from tests.support.played_back import on_device, played_back
from tests.support.repetitive_world import Ask, Family, save_repetitive_model
from tests.support.speculated import (
    COMMON_FLAGS,
    Run,
    TurnExecutor,
    difference,
    engine_of,
    listen,
    run,
    single_threaded,
)

PLAIN = ("--speculative-method", "none")
DRAFTED = ("--speculation-schedule", "sync", "--draft-length-policy", "fixed")  # by a model on the device
NUM_FAMILIES = 9
CELLS: tuple[tuple[str, ...], ...] = (
    PLAIN,
    DRAFTED,
    (*PLAIN, "--max-num-batched-tokens", "24"),
    (*PLAIN, "--num-kv-blocks", "30", "--preemption", "swap"),
    (*PLAIN, "--num-kv-blocks", "34", "--preemption", "recompute", "--max-num-seqs", "3"),
    (),
)
ROW_POINTS: tuple[FaultPoint, ...] = ("logits_nan", "sampler_raise", "detokenize_raise")
PASS_POINTS: tuple[FaultPoint, ...] = ("forward_raise", "forward_oom", "forward_sleep")
DRAFT_POINTS: tuple[FaultPoint, ...] = ("draft_raise", "draft_garbage", "draft_out_of_vocab")


class InOrder(Executor):
    """As an executor of one thread: each call runs behind the last, some turns of the event loop later."""

    def __init__(self, seed: int, most: int) -> None:
        self._turns = TurnExecutor(seed, most)
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that is done some turns later."""
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: call(*args, **kwargs)))
        self._turns.submit(self._run_oldest)
        return future

    def _run_oldest(self) -> None:
        future, call = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class LateAnswers(Executor):
    """Each call runs some turns of the event loop later, and its answer comes some turns behind it."""

    def __init__(self, seed: int, most: int) -> None:
        self._turns = TurnExecutor(seed, most)

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that is done some turns later."""
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    answer = partial(future.set_result, call(*args, **kwargs))
                except Exception as error:
                    answer = partial(future.set_exception, error)
                self._turns.submit(answer)

        self._turns.submit(work)
        return future


def runner_factory(max_tokens: int) -> Callable[..., CudaRunner]:
    """What makes a GPU's runner, on a CPU; steps that read prompts are recorded up to so many tokens."""

    def make(loaded: LoadedModel, sampler: Sampler, sizes: RunnerSizes, for_drafts: ForDrafts) -> CudaRunner:
        plain = ModelRunner(loaded, *sizes[:2], sampler, sizes.num_host_blocks, for_drafts)
        max_blocks = -(-loaded.max_model_len // sizes.block_size)
        limits = GraphLimits(8, max_blocks, min(sizes.max_draft_tokens, 3), max_tokens=max_tokens)
        return played_back(plain, sizes.max_num_tokens, limits)

    return make


class World:
    """The model, what is asked of it, and what it says when nothing goes wrong; each is made once."""

    def __init__(self, directory: Path) -> None:
        self.model = save_repetitive_model(directory / "model")
        self.asks: list[list[Family]] = [plain_families(NUM_FAMILIES), adjusted_families(NUM_FAMILIES)]
        self.expected: list[Run] = asyncio.run(self._speak())

    async def _speak(self) -> list[Run]:
        async with engine_of(self.model, *PLAIN) as engine:
            return [await run(engine, families, 1, cuts=False) for families in self.asks]


def draw_plan(draw: random.Random, *, drafts: bool) -> list[PlannedFault]:
    """A few faults, each now and then; a request that is hit for ever is one of those asked first."""
    points = [*ROW_POINTS, *PASS_POINTS, *PASS_POINTS, *(DRAFT_POINTS if drafts else ())]
    plan = []
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        point = draw.choice(points)
        request = draw.choice((None, draw.randint(1, NUM_FAMILIES)))
        count = draw.choice((1, 1, 2, 4))
        if request is not None and point in ("forward_raise", *ROW_POINTS) and draw.random() < 0.4:
            count = ALWAYS
        every = draw.choice((1, 1, 3, 7)) if request is not None or point in ROW_POINTS else 7
        if point == "forward_oom":
            every = max(every, 3)  # three in a row would be the end of the engine
        at = draw.randint(1, 12 if request is not None else 70)
        plan.append(PlannedFault(point, at, count, every, request, seconds=0.001))
    return plan


async def play(world: World, seed: int) -> Counter[str]:
    """One run; what happened in it. AssertionError says what was wrong."""
    draw = random.Random(seed)
    round_number, cell = divmod(seed, len(CELLS))
    flags, which = CELLS[cell], round_number % 2
    plan = draw_plan(draw, drafts=flags[:2] != PLAIN)
    make = runner_factory(64 if draw.random() < 0.3 else 0)
    steps, seen = StepCount(), Counter[str]()
    asked = [*flags]
    if flags == DRAFTED:
        asked += ["--speculative-method", "draft-model", "--draft-model", str(world.model)]
    settings = load_settings([str(world.model), *COMMON_FLAGS, *asked], WITHOUT_KERNELS)

    def load(*factories: PartFactories) -> EngineParts:
        beside = patch("engine.compute.drafters.draft_loader.on_device", on_device)
        with patch("engine.startup.build.make_runner", make), beside:
            parts = load_parts(settings, *factories)
        return replace(parts, runner=steps.watch(parts.runner, _already_ahead))

    executors = Executors(InOrder(seed, 6), LateAnswers(seed + 1, 8), InlineExecutor())
    engine = FaultyEngine(plan, load, EngineLimits(), executors)
    await engine.start()
    try:
        await _serve(engine, world, which, draw, seen)
        await _judge_end(engine, plan, seen)
    except BaseException as error:
        error.add_note(f"seed {seed}, {flags}, {plan}; replay: python -m tests.support.fault_fuzz {seed}")
        raise
    finally:
        await engine.stop()
    seen.update({"launched ahead": steps.num_ahead, "drawn later": steps.num_drawn_later})
    seen["unread drafts"] = steps.num_unread
    return seen


def _already_ahead(runner: StepRunner) -> AheadRunner:
    assert isinstance(runner, FaultyAheadRunner)
    return runner


async def _serve(
    engine: FaultyEngine, world: World, which: int, draw: random.Random, seen: Counter[str]
) -> None:
    """Ask for everything, so many at a time, and hold each answer against the right one."""
    places = asyncio.Semaphore(draw.randint(1, 6))
    expected = world.expected[which].spoken

    async def serve(family: list[Ask]) -> None:
        async with places:
            streams = [engine.submit(ask.request) for ask in family]
            heard = await asyncio.gather(
                *(listen(engine, *each) for each in zip(family, streams, strict=True))
            )
        for ask, spoken in zip(family, heard, strict=True):
            reason = spoken.finish.reason
            seen[reason.value] += 1
            assert reason is not FinishReason.ABORT or ask.cut is not None, ask.name
            right = expected[ask.name]
            if reason is FinishReason.ERROR:
                assert spoken.token_ids == right.token_ids[: len(spoken.token_ids)], ask.name
            else:
                fault = difference(right, spoken)
                assert fault is None, f"{ask.name}: {fault}"

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for family in world.asks[which]:
            group.create_task(serve(family))


async def _judge_end(engine: FaultyEngine, plan: list[PlannedFault], seen: Counter[str]) -> None:
    """No more requests have failed than may have, and of those that are over nothing is left."""
    metrics, batcher = engine.metrics, engine._loaded.batcher
    assert metrics.requests_started == sum(metrics.requests_finished.values())
    seen["passes failed"] += metrics.engine_errors["forward"]
    seen["preempted"] += metrics.preemptions.total()
    assert engine.state is EngineState.READY, "no plan has three batches in a row fail"
    kinds = {fault.point for fault in plan}
    if not kinds & {"forward_raise", "forward_oom"} and all(fault.count != ALWAYS for fault in plan):
        assert seen["error"] <= sum(fault.count for fault in plan if fault.point in ROW_POINTS)
    async with asyncio.timeout(5):
        while batcher._in_flight:  # noqa: ASYNC110  # a step ahead, for nobody
            await asyncio.sleep(0)
    gauges = engine.gauges()
    assert gauges.kv_blocks_used == gauges.num_requests_swapped == 0
    assert gauges.num_requests_running == gauges.num_requests_waiting == 0
    assert not metrics.engine_errors["kv"]
    batcher.kv.check_integrity()


def main() -> None:
    """Play some seeds and print what they saw; the first that goes wrong ends it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory, single_threaded():
        world = World(Path(directory))
        for seed in range(options.seed, options.seed + options.count):
            seen += asyncio.run(play(world, seed))
    print(dict(seen))


if __name__ == "__main__":
    main()
