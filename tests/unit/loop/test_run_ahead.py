"""Drafters beside the target and before it: who waits for whom, who stops when, and what failures cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from engine.loop.daemon_executor import DaemonExecutor
from engine.loop.run_ahead import RunAhead
from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.request import Request
from engine.plan.speculation.controller import make_length_policy
from engine.plan.speculation.drafter import Draft, DraftJob, DraftResult, Lane
from engine.plan.speculation.length_policy import StepLoad
from engine.plan.speculation.pass_costs import PassCosts
from engine.plan.speculation.speculation_config import Schedule, SpeculationConfig, Verification
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder
from engine.plan.step_records import ScheduledRequest
from tests.support.engines import InlineExecutor
from tests.support.factories import make_request
from tests.support.fake_drafters import FakeDrafter
from tests.support.fakes import VOCAB_SIZE, ManualClock, expected_output
from tests.support.virtual_time import VirtualTimeLoop, run_in_virtual_time

LOAD = StepLoad(num_seqs=1, num_tokens=1, num_prefill_tokens=0, max_draft_tokens=100)
LONGEST = 4


class Stage:
    """RunAhead over fake drafters, with a target that draws what the fake model does."""

    def __init__(
        self,
        schedule: Schedule,
        *drafters: FakeDrafter,
        executor: Executor | None = None,
        clock: Callable[[], float] | None = None,
        verification: Verification = "match",
        num_lanes: int = 0,
    ) -> None:
        config = SpeculationConfig(VOCAB_SIZE, LONGEST, schedule, verification, "fixed", 0.0)
        costs = PassCosts()
        sources = [DraftSource(drafter, LONGEST, max_num_lanes=num_lanes) for drafter in drafters]
        self.decoder = SpeculativeDecoder(config, sources, make_length_policy(config, costs), costs)
        self.metrics = BatchMetrics()
        self.executor = executor or InlineExecutor()
        self.clock = clock or ManualClock()
        self.run_ahead = RunAhead(self.decoder, self.executor, self.metrics, self.clock)
        self.num_requests = 0

    @property
    def num_errors(self) -> int:
        return self.metrics.engine_errors["drafter"]

    def open(self, name: str = "a", prompt: int = 3) -> Request:
        request = make_request(name, prompt, arrival=self.num_requests, max_tokens=100, temperature=0.0)
        self.num_requests += 1
        self.decoder.open(request)
        request.num_computed_tokens = len(request.token_ids) - 1
        return request

    async def prepare(self) -> int:
        """Before a step; how many times drafts were made."""
        self.run_ahead.choose_arm(1)
        count = 0
        while await self.run_ahead.draft_once():
            count += 1
            assert count <= 100, "the target is never let go"
        return count

    async def step(self, *requests: Request) -> int:
        """One whole iteration; how many drafts came true."""
        await self.prepare()
        chosen = {r.request_id: drafted for r, drafted in self.decoder.choose(requests, LOAD)}
        self.run_ahead.beside_step()
        await settle()
        num_accepted = 0
        for request in requests:
            drafted = chosen.get(request.request_id, ())
            right = expected_output(request.token_ids, len(drafted) + 1)
            count = 1
            while count <= len(drafted) and drafted[count - 1].token_id == right[count - 1]:
                count += 1
            request.token_ids += right[:count]
            request.num_computed_tokens = len(request.token_ids) - 1
            self.decoder.commit(request, drafted, count)
            if any(link.drafter.reads_features for link in self.decoder.links):
                rows = ScheduledRequest(request.request_id, 0, 0, samples=True)
                self.decoder.keep_features(rows, "x" * count)
            num_accepted += count - 1
        self.run_ahead.after_step(len(requests), num_accepted + len(requests), 0.02)
        await settle()
        return num_accepted


async def settle() -> None:
    """Let everything that is ready on the event loop happen."""
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def draft_thread() -> AsyncIterator[DaemonExecutor]:
    """A real one, which may take its time when the machine is busy."""
    executor = DaemonExecutor("test-draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.loop.run_ahead._PATIENCE_S", 10.0)
        yield executor
    executor.shutdown()


def perfect(**ways: Any) -> FakeDrafter:
    return FakeDrafter(**{"alpha": 1.0, **ways})


# Before the step, or beside it.


async def test_sync_waits_until_all_drafts_are_there() -> None:
    drafter = perfect()
    stage = Stage("sync", drafter)
    a, b = stage.open("a"), stage.open("b")
    assert await stage.prepare() == LONGEST, "one micro-step a draft, for both at once"
    assert [len(d) for _, d in stage.decoder.choose([a, b], LOAD)] == [LONGEST, LONGEST]
    assert drafter.num_calls == LONGEST
    assert await stage.step(a, b) == 2 * LONGEST
    assert drafter.num_calls == LONGEST, "nothing runs beside the target"


@pytest.mark.parametrize("schedule", ["sync", "async", "auto"])
async def test_no_step_waits_for_drafts_while_prompts_leave_them_no_room(schedule: Schedule) -> None:
    drafter = perfect(method="heads", is_stepwise=False, reads_features=True)
    stage = Stage(schedule, drafter)
    a = stage.open()
    while not await stage.step(a):
        assert drafter.num_calls < 20, "it is waited for"
    full = replace(LOAD, num_prefill_tokens=100, max_draft_tokens=0)
    for _ in range(5):
        num_calls, arm = drafter.num_calls, stage.run_ahead._arm
        assert stage.decoder.choose([a], full) == []
        assert await stage.prepare() == 0
        assert (drafter.num_calls, stage.run_ahead._arm) == (num_calls, arm), "nothing is measured either"
    stage.decoder.choose([a], replace(LOAD, num_prefill_tokens=100, max_draft_tokens=1))
    assert not stage.decoder.is_crowded_out
    stage.decoder.choose([a], full)
    stage.decoder.choose([a], replace(LOAD, max_draft_tokens=0))
    assert not stage.decoder.is_crowded_out, "that was a step ahead, without drafts and prompts"
    for _ in range(3):
        if await stage.step(a):
            break
    else:
        pytest.fail("it is not waited for any more")


async def test_async_drafts_beside_the_pass_and_past_it() -> None:
    drafter = perfect()
    stage = Stage("async", drafter)
    a = stage.open()
    assert await stage.prepare() == 0
    assert drafter.num_calls == 0
    accepted = [await stage.step(a) for _ in range(6)]
    assert accepted[0] == 0
    assert accepted[2:] == [LONGEST] * 4
    assert stage.decoder.stats.run_ahead == {"hit": 6}


@pytest.mark.parametrize(
    ("hits", "misses", "step_s", "calls"),
    [
        (0, 1, 0.010, 2),
        (1, 0, 0.010, 3),
        (1, 1, 0.0101, 3),
        (1, 1, 0.0099, 2),
        (0, 1, None, 3),
        (0, 0, 0.010, 3),
    ],
)
def test_no_micro_step_is_begun_that_would_rather_keep_the_drafter_from_new_tokens(
    hits: int, misses: int, step_s: float | None, calls: int
) -> None:
    """Its third would begin after 8 ms and last 4, of which the part before the step's end may be won."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        drafter = perfect(step_s=0.004)
        stage = Stage("async", drafter, clock=loop.time)
        stage.open()
        stage.decoder.stats.run_ahead.update(hit=hits, miss=misses)
        await stage.prepare()
        stage.run_ahead.beside_step(step_s)
        await asyncio.sleep(0.0095)
        assert drafter.num_calls == calls
        if calls == 2:
            stage.run_ahead.after_step(1, 1, 0.0095)
            await settle()
            assert drafter.num_calls == 3, "after the step it is begun"

    run_in_virtual_time(main())


@pytest.mark.parametrize("schedule", ["auto", "sync"])
async def test_cheap_drafters_are_called_on_the_spot(schedule: Schedule) -> None:
    threads: list[threading.Thread] = []
    drafter = perfect(
        is_cheap=True, is_stepwise=False, before=lambda jobs: threads.append(threading.current_thread())
    )
    async with draft_thread() as executor:
        stage = Stage(schedule, drafter, executor=executor)
        a = stage.open()
        assert await stage.prepare() == 0
        assert await stage.step(a) == LONGEST
    assert set(threads) == {threading.current_thread()}


async def test_async_means_that_nobody_is_called_on_the_spot() -> None:
    threads: list[threading.Thread] = []
    drafter = perfect(is_cheap=True, before=lambda jobs: threads.append(threading.current_thread()))
    async with draft_thread() as executor:
        stage = Stage("async", drafter, executor=executor)
        a = stage.open()
        await stage.step(a)
        await until(lambda: threads)
    assert threading.current_thread() not in threads


async def test_what_a_cheap_drafter_knows_no_other_is_asked() -> None:
    cheap, model = perfect(is_cheap=True, is_stepwise=False, method="ngram"), perfect()
    stage = Stage("sync", cheap, model)
    await stage.step(stage.open())
    assert (cheap.num_calls, model.num_calls) == (1, 0)


async def test_who_reads_features_is_waited_for_only_where_its_bet_was_wrong() -> None:
    drafter = perfect(reads_features=True, is_stepwise=False)
    stage = Stage("async", drafter)
    a = stage.open()
    assert await stage.step(a) == 0, "nothing was left yet"
    assert await stage.step(a) == LONGEST, "it was waited for, and went on beside the pass"
    num_calls = drafter.num_calls
    assert await stage.prepare() == 0, "the token that the target drew was foreseen, and what follows"
    assert drafter.num_calls == num_calls and len(stage.decoder.choose([a], LOAD)) == 1
    drafter.alpha = 0.0
    for _ in range(3):
        await stage.step(a)
    num_calls = drafter.num_calls
    assert await stage.prepare() == 1, "it had bet on another token"
    assert drafter.num_calls == num_calls + 1


def with_lanes(job: DraftJob, draft: Draft) -> Draft:
    """Where the draft that an answer begins with is wrong, what is right there, and what follows."""
    known = foreseen[job.request.request_id]
    lanes = []
    for position in range(job.num_committed, job.num_committed + job.num_lanes):
        right = expected_output(known[:position], 3)
        if position < len(known) and known[position] != right[0]:
            lanes.append(Lane(position, tuple(right)))
    return replace(draft, lanes=tuple(lanes))


foreseen: dict[str, list[int]] = {}


async def test_of_lanes_the_one_that_came_true_is_gone_on_with() -> None:
    """Each draft is wrong, and the drafter had foreseen in time what comes instead."""
    drafter = FakeDrafter(alpha=0.0, spoil=with_lanes)
    foreseen.clear()
    drafter.known = foreseen
    stage = Stage("async", drafter, num_lanes=2)
    a = stage.open()
    assert await stage.step(a) == 0
    assert stage.decoder.stats.run_ahead == {"lane": 1}
    assert await stage.step(a) == 2, "both drafts of the lane came true"


async def test_where_lanes_are_kept_and_none_came_true_a_step_waits() -> None:
    drafter = FakeDrafter(alpha=0.0)
    stage = Stage("async", drafter, num_lanes=2)
    a = stage.open()
    await stage.step(a)
    assert await stage.prepare() == LONGEST
    assert [len(d) for _, d in stage.decoder.choose([a], LOAD)] == [LONGEST]
    without = Stage("async", FakeDrafter(alpha=0.0))
    b = without.open()
    await without.step(b)
    assert await without.prepare() == 0


@pytest.mark.parametrize("num_lanes", [0, 2])
async def test_auto_tries_lanes_where_the_drafter_can(num_lanes: int) -> None:
    asked: set[int] = set()
    drafter = perfect(before=lambda jobs: asked.update(job.num_lanes for job in jobs))
    stage = Stage("auto", drafter, num_lanes=num_lanes)
    a = stage.open()
    for _ in range(300):
        await stage.step(a)
        if len(a.token_ids) > 80:
            stage.decoder.close("a")
            a = stage.open()
    assert max(asked) == num_lanes
    assert stage.run_ahead.state().drafters[0].schedule in ("sync", "async", "auto", "off")


async def test_a_quick_drafter_beside_it_does_not_keep_a_reader_from_its_turn() -> None:
    reader = perfect(reads_features=True, is_stepwise=False)
    text = perfect(method="ngram", is_cheap=True, is_stepwise=False, is_shy=True, alpha=0.0)
    async with draft_thread() as executor:
        stage = Stage("async", text, reader, executor=executor)
        a = stage.open()
        accepted = [await stage.step(a) for _ in range(12)]
    assert sum(accepted) > 0


async def test_a_drafter_that_takes_for_ever_costs_async_nothing() -> None:
    gate = threading.Event()
    drafter = perfect(before=lambda jobs: gate.wait(10))
    async with draft_thread() as executor:
        stage = Stage("async", drafter, executor=executor)
        a = stage.open()
        for _ in range(20):
            await asyncio.wait_for(stage.step(a), 1)
        await until(lambda: drafter.num_calls)
        assert drafter.num_calls == 1
        assert a.num_output_tokens == 20
        gate.set()
        await until(lambda: drafter.num_calls > 1)
        await until(lambda: len(stage.decoder._active["a"].tape) > 0)
        assert await stage.step(a) > 0, "it is welcome back"


def test_sync_waits_for_a_slow_drafter_once_and_again_when_it_is_quick() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        drafter = perfect(step_s=3.0)
        stage = Stage("sync", drafter, clock=loop.time)
        a = stage.open()
        times = []
        for _ in range(10):
            begin = loop.time()
            await stage.prepare()
            times.append(round(loop.time() - begin, 3))
            await stage.step(a)
            await asyncio.sleep(1)
        assert times == [0.5] + [0.0] * 9
        assert stage.num_errors == 0, "slow is not broken"
        assert "a" not in drafter.closed, "and it is not made to read all again"
        drafter.step_s = 0.01
        await asyncio.sleep(5)
        await stage.step(a)  # one to see that it is quick
        await asyncio.sleep(5)
        assert await stage.step(a) == LONGEST

    run_in_virtual_time(main())


def test_a_slow_target_waits_as_long_as_its_own_step() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stage = Stage("sync", perfect(step_s=3.0), clock=loop.time)
        for _ in range(4):
            stage.decoder.observe_pass(1, 1, 0, 5.0, 5.0)
        assert await stage.step(stage.open()) == LONGEST

    run_in_virtual_time(main())


def test_what_waiting_takes_is_learnt_and_holds_only_while_waiting() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        stage = Stage("sync", perfect(step_s=0.1), clock=loop.time)
        requests = [stage.open(f"r{i}") for i in range(10)]
        for _ in range(20):
            await stage.step(*requests)
        stage.run_ahead.choose_arm(1)
        assert stage.decoder.links[0].is_awaited
        assert stage.decoder.links[0]._waits.seconds(10, 10) == pytest.approx(0.1, rel=0.05)
        stage.run_ahead._arm = "async"
        stage.run_ahead.choose_arm(1)
        assert not stage.decoder.links[0].is_awaited

    run_in_virtual_time(main())


@pytest.mark.parametrize(
    ("schedule", "is_cheap", "charged_s"),
    [("sync", False, 0.002), ("sync", True, 0.002), ("async", False, 0.0)],
    ids=["waited for", "inline", "beside the pass"],
)
def test_only_what_a_step_waits_for_is_a_cost_of_drafts(
    schedule: Schedule, is_cheap: bool, charged_s: float
) -> None:
    async def main() -> None:
        loop = cast(VirtualTimeLoop, asyncio.get_running_loop())
        drafter = perfect(is_cheap=is_cheap, is_stepwise=not is_cheap)
        stage = Stage(schedule, drafter, clock=loop.time)
        stage.decoder.costs.seed([(1, 1, 0.02)])
        if is_cheap:
            drafter.before = lambda jobs: loop.pass_by(LONGEST * charged_s)
        else:
            drafter.step_s = 0.002
        a = stage.open()
        for _ in range(20):
            await stage.step(a)
            await asyncio.sleep(0.02)
        terms = stage.decoder.gain.terms
        assert terms.alpha == 1.0
        assert terms.gamma == pytest.approx(LONGEST, rel=0.1)
        assert terms.cost_ratio == pytest.approx(charged_s / 0.02, rel=0.1)
        assert terms.speedup == pytest.approx((LONGEST + 1) / (1 + LONGEST * charged_s / 0.02), rel=0.1)

    run_in_virtual_time(main())


# Readers.


async def test_readers_hold_a_step_up_for_one_micro_step_only() -> None:
    drafter = perfect(reads=2)
    stage = Stage("sync", drafter)
    a = stage.open(prompt=20)
    assert await stage.prepare() == 1, "it is not known yet that it has to read"
    calls = []
    while await stage.step(a) == 0:
        calls.append(drafter.num_calls)
    assert len(calls) > 10, "two tokens read a step, one more known"
    assert calls == list(range(2, 2 + len(calls)))


async def test_two_drafters_that_read_take_turns_and_are_told_of_everything() -> None:
    first, second = perfect(reads=3), perfect(method="medusa", reads=3)
    stage = Stage("sync", first, second)
    a = stage.open(prompt=12)
    for _ in range(30):
        before = first.num_calls + second.num_calls
        if await stage.step(a):
            break
        assert first.num_calls + second.num_calls - before <= 2
    assert await stage.step(a) == LONGEST
    assert not first.violations and not second.violations
    assert stage.num_errors == 0


async def test_those_who_need_not_read_do_not_wait_for_those_who_do() -> None:
    drafter = perfect(reads=4)
    stage = Stage("sync", drafter)
    short = stage.open("short", prompt=2)
    await stage.step(short)
    long = stage.open("long", prompt=60)
    assert await stage.step(short, long) == LONGEST


# Cancellation.


@pytest.mark.parametrize("ending", ["close", "pause", "give_up"])
async def test_after_its_end_no_micro_step_touches_a_request(ending: str) -> None:
    begun, gate = threading.Semaphore(0), threading.Semaphore(0)

    def before(jobs: Sequence[DraftJob]) -> None:
        begun.release()
        assert gate.acquire(timeout=10)

    drafter = perfect(before=before)
    async with draft_thread() as executor:
        stage = Stage("async", drafter, executor=executor)
        stage.open("a"), stage.open("b")
        stage.run_ahead.beside_step()
        await until(lambda: begun.acquire(blocking=False))
        getattr(stage.decoder, ending)("a")
        for _ in range(3):
            gate.release()
            await until(lambda: begun.acquire(blocking=False))
        assert drafter.touched == {"a": 1, "b": 4}, "one was out when it ended"
        assert drafter.closed == ["a"]
        assert "a" not in drafter.known
        for _ in range(50):
            gate.release()
    assert stage.decoder.stats.dropped["cancelled"] == 1


@pytest.mark.parametrize("schedule", ["sync", "async", "auto"])
async def test_idle_drafters_forget_all_that_has_ended(schedule: Schedule) -> None:
    drafters = [
        perfect(),
        perfect(method="medusa"),
        perfect(method="ngram", is_cheap=True, is_shy=True, alpha=0.0),
    ]
    async with draft_thread() as executor:
        stage = Stage(schedule, *drafters, executor=executor)
        requests = [stage.open(f"r{i}") for i in range(5)]
        for _ in range(30):
            await stage.step(*requests)
        for drafter in drafters:  # known to all of them
            drafter.known.update({request.request_id: [] for request in requests})
        for sequence in stage.decoder._active.values():
            for view in sequence.views.values():
                view.num_synced = 1
        stage.run_ahead.beside_step()
        for request in requests:
            stage.decoder.close(request.request_id)
        stage.run_ahead.rest()
        await until(lambda: not any(drafter.known for drafter in drafters))


@pytest.mark.parametrize(("reads_features", "num_lanes"), [(True, 0), (False, 2)])
async def test_a_drafter_that_a_step_waits_for_forgets_though_it_was_busy_when_all_ended(
    reads_features: bool, num_lanes: int
) -> None:
    gate = threading.Event()
    gate.set()
    drafter = perfect(reads_features=reads_features, is_stepwise=False, before=lambda jobs: gate.wait(10))
    async with draft_thread() as executor:
        stage = Stage("async", drafter, executor=executor, num_lanes=num_lanes)
        a = stage.open()
        for _ in range(3):
            await stage.step(a)
        await until(lambda: stage.run_ahead._task is None)
        stage.decoder.choose([a], LOAD)
        gate.clear()
        stage.run_ahead.beside_step()
        assert stage.run_ahead._task is not None
        stage.decoder.close("a")
        stage.run_ahead.after_step(1, 1, 0.02)
        stage.run_ahead.rest()
        gate.set()
        await until(lambda: drafter.closed == ["a"])


async def test_a_stopped_run_ahead_asks_for_nothing_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    drafter = perfect(before=lambda jobs: gate.wait(10))
    async with draft_thread() as executor:
        stage = Stage("async", drafter, executor=executor)
        a = stage.open()
        stage.run_ahead.beside_step()
        await until(lambda: drafter.num_calls)
        stage.run_ahead.stop()
        await stage.step(a)
        stage.decoder.close("a")
        stage.run_ahead.after_step(1, 1, 0.02)
        stage.run_ahead.rest()
        gate.set()
        await until(lambda: drafter.num_drafted)
        await settle()
        assert drafter.num_calls == 1
    assert not caplog.records


# Failures.


def raising(error: BaseException) -> Callable[[Sequence[DraftJob]], None]:
    def before(jobs: Sequence[DraftJob]) -> None:
        raise error

    return before


@pytest.mark.parametrize(
    ("error", "is_cheap"),
    [
        (ValueError("no"), True),
        (ValueError("no"), False),
        (StopIteration(), True),
        (StopIteration(), False),
        (MemoryError(), False),
        (asyncio.CancelledError(), False),
        (SystemExit(), False),
    ],
    ids=repr,
)
async def test_a_drafter_that_raised_drafts_again_with_the_next_token(
    error: BaseException, is_cheap: bool
) -> None:
    drafter = perfect(is_cheap=is_cheap, is_stepwise=False, before=raising(error))
    async with draft_thread() as executor:
        stage = Stage("sync", drafter, executor=executor)
        a = stage.open()
        assert await stage.step(a) == 0
        assert stage.num_errors == 1
        drafter.before = None
        assert await stage.step(a) == LONGEST
    assert drafter.closed == ["a"], "nobody knows what it remembered"
    assert stage.num_errors == 1


@pytest.mark.parametrize("is_cheap", [True, False])
async def test_a_drafter_that_keeps_failing_is_left_alone_and_tried_again(is_cheap: bool) -> None:
    drafter = perfect(is_cheap=is_cheap, is_stepwise=False, before=raising(ValueError("no")))
    stage = Stage("sync", drafter)
    clock = cast(ManualClock, stage.clock)
    a = stage.open()
    for _ in range(10):
        assert await stage.step(a) == 0
    assert (drafter.num_calls, stage.num_errors) == (3, 3)
    clock.advance(5.0)
    await stage.step(a)
    await stage.step(a)
    assert drafter.num_calls == 4, "one try"
    clock.advance(10.0)
    drafter.before = None
    assert await stage.step(a) == LONGEST
    assert await stage.step(a) == LONGEST
    assert stage.num_errors == 4


@pytest.mark.parametrize("schedule", ["sync", "async"])
async def test_no_step_waits_for_drafts_of_one_that_is_left_alone(schedule: Schedule) -> None:
    drafter = perfect(before=raising(ValueError("no")))
    stage = Stage(schedule, drafter)
    a = stage.open()
    stage.run_ahead.choose_arm(1)
    assert stage.decoder.expects_drafts([a])
    for _ in range(6):
        await stage.step(a)
        await settle()
    assert drafter.num_calls == 3
    stage.run_ahead.choose_arm(1)
    assert not stage.decoder.expects_drafts([a]), "the device may have the next step at once"


@pytest.mark.parametrize(("draft_s", "is_expected"), [(0.01, True), (0.05, False)])
async def test_who_drafts_for_longer_than_a_step_lasts_keeps_none_from_being_launched_ahead(
    draft_s: float, is_expected: bool
) -> None:
    clock = ManualClock()
    stage = Stage("async", perfect(before=lambda _: clock.advance(draft_s)), clock=clock)
    for _ in range(20):
        stage.decoder.costs.observe(1, 1, 0.02)
    a = stage.open()
    await stage.step(a)
    stage.decoder.pause("a")
    stage.decoder.open(a)  # without the drafts that were made beside the step
    stage.run_ahead.choose_arm(1)
    assert stage.decoder.expects_drafts([a]) is is_expected


async def test_while_one_is_left_alone_the_next_drafts() -> None:
    first, second = perfect(before=raising(ValueError("no"))), perfect(method="medusa")
    stage = Stage("sync", first, second)
    a = stage.open()
    accepted = [await stage.step(a) for _ in range(5)]
    assert accepted == [LONGEST] * 5
    assert first.num_calls == 3


async def test_async_does_not_ask_again_and_again_when_it_fails() -> None:
    drafter = perfect(before=raising(ValueError("no")))
    stage = Stage("async", drafter)
    stage.open()
    stage.run_ahead.beside_step()
    for _ in range(20):
        await settle()
    assert drafter.num_calls == 1


async def test_a_drafter_that_cannot_even_forget_stops_nobody() -> None:
    def before_close(request_ids: Sequence[str]) -> None:
        raise ValueError("no")

    drafters = [perfect(before_close=before_close), perfect(is_cheap=True, before_close=before_close)]
    stage = Stage("sync", *drafters)
    for name in ("a", "b"):
        request = stage.open(name)
        await stage.step(request)
        stage.decoder.close(name)
        stage.run_ahead.rest()
        await settle()
    assert stage.num_errors > 0


async def test_who_always_says_that_it_has_to_read_does_not_spin() -> None:
    drafter = perfect(
        spoil=lambda job, draft: Draft(draft.request_id, job.epoch, job.next_position, (), is_behind=True)
    )
    stage = Stage("async", drafter)
    a = stage.open(prompt=5)
    for _ in range(5):
        await stage.step(a)
    for _ in range(100):
        await settle()
    assert drafter.num_calls < 15


FAULTS: dict[str, Callable[[DraftJob, Draft], Any]] = {
    "an empty answer of another epoch": lambda job, draft: Draft(
        draft.request_id, job.epoch + 1, draft.first, ()
    ),
    "an empty answer for elsewhere": lambda job, draft: Draft(draft.request_id, job.epoch, 0, ()),
    "a tree for elsewhere": lambda job, draft: Draft(draft.request_id, job.epoch, 1, (3,), (-1,)),
    "a tree behind drafts": lambda job, draft: (
        Draft(draft.request_id, job.epoch, draft.first, (3,), (-1,))
        if job.num_committed < job.next_position
        else draft
    ),
    "nothing": lambda job, draft: None,
    "a string": lambda job, draft: "draft",
    "nobody's": lambda job, draft: Draft("nobody", job.epoch, draft.first, (3,)),
}


@pytest.mark.parametrize("is_cheap", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
async def test_no_answer_keeps_the_target_from_its_step(fault: str, is_cheap: bool) -> None:
    drafter = perfect(is_cheap=is_cheap, spoil=FAULTS[fault])
    stage = Stage("sync", drafter)
    a, b = stage.open("a"), stage.open("b")
    for _ in range(6):
        await stage.step(a, b)
    if not (is_cheap and fault == "a tree behind drafts"):  # it drafts once a step
        assert stage.num_errors >= 3
    assert a.output_token_ids == expected_output([0, 1, 2], a.num_output_tokens)
    assert not drafter.violations


@pytest.mark.parametrize("result", [None, (), "x", DraftResult((), float("nan"))], ids=str)
async def test_no_result_keeps_the_target_from_its_step(result: Any) -> None:
    drafter = perfect(mangle=lambda _: result)
    stage = Stage("sync", drafter)
    a = stage.open()
    for _ in range(5):
        assert await stage.step(a) == 0
    assert (stage.num_errors, drafter.num_calls) == (3, 3)


async def test_one_request_s_bad_answers_leave_the_others_theirs() -> None:
    drafter = perfect(
        is_stepwise=False,
        spoil=lambda job, draft: (
            Draft("a", job.epoch, draft.first, (VOCAB_SIZE,)) if draft.request_id == "a" else draft
        ),
    )
    stage = Stage("sync", drafter)
    a, b = stage.open("a"), stage.open("b")
    assert await stage.step(a, b) == LONGEST
    assert stage.decoder.stats.dropped["error"] == 1
    assert b.num_output_tokens == LONGEST + 1


LAWS: dict[str, Any] = {
    "nothing": None,
    "a list": [1.0] * VOCAB_SIZE,
    "too short": torch.full((VOCAB_SIZE - 1,), 0.5),
    "a column": torch.full((VOCAB_SIZE, 1), 0.5),
    "float64": torch.full((VOCAB_SIZE,), 0.5, dtype=torch.float64),
    "NaN": torch.full((VOCAB_SIZE,), 0.5).index_fill(0, torch.tensor([7]), torch.nan),
    "infinity": torch.full((VOCAB_SIZE,), 0.5).index_fill(0, torch.tensor([7]), torch.inf),
    "negative": torch.full((VOCAB_SIZE,), 0.5).index_fill(0, torch.tensor([7]), -0.1),
    "logits": torch.full((VOCAB_SIZE,), 12.5),
}


@pytest.mark.parametrize("law", LAWS)
async def test_what_drafts_were_drawn_from_is_checked_where_verification_reads_it(law: str) -> None:
    def spoil(job: DraftJob, draft: Draft) -> Draft:
        return Draft(draft.request_id, draft.epoch, draft.first, draft.token_ids, probs=(LAWS[law],))

    stage = Stage("sync", perfect(spoil=spoil), verification="rejection")
    assert await stage.step(stage.open()) == 0
    assert stage.num_errors == 1
    good = torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE)
    stage = Stage(
        "sync", perfect(spoil=lambda job, d: Draft(*_fields(d), probs=(good,))), verification="block"
    )
    assert await stage.step(stage.open()) == LONGEST
    assert stage.num_errors == 0


def _fields(draft: Draft) -> tuple[str, int, int, tuple[int, ...]]:
    return draft.request_id, draft.epoch, draft.first, draft.token_ids


async def test_what_does_not_come_back_is_told_once() -> None:
    gate = threading.Event()
    async with draft_thread() as executor:
        stage = Stage("async", perfect(before=lambda jobs: gate.wait(10)), executor=executor)
        clock = cast(ManualClock, stage.clock)
        a = stage.open()
        await stage.step(a)
        clock.advance(29.0)
        await stage.step(a)
        assert stage.num_errors == 0
        clock.advance(1.0)
        await stage.step(a)
        await stage.step(a)
        assert stage.num_errors == 1
        gate.set()


async def test_no_thread_to_draft_in_costs_only_drafts() -> None:
    executor = DaemonExecutor("test-draft")
    executor.shutdown()
    schedules: tuple[Schedule, ...] = ("sync", "async")
    for schedule in schedules:
        stage = Stage(schedule, perfect(), executor=executor)
        a = stage.open()
        for _ in range(5):
            assert await stage.step(a) == 0
        stage.decoder.close("a")
        stage.run_ahead.rest()
        assert stage.num_errors in (3, 4), "three steps, and once if it was to forget something"


# Changes of arm.


async def test_a_micro_step_that_is_out_when_the_arm_changes_is_taken_and_not_followed() -> None:
    begun, gate = threading.Semaphore(0), threading.Semaphore(0)

    def before(jobs: Sequence[DraftJob]) -> None:
        begun.release()
        assert gate.acquire(timeout=10)

    drafter = perfect(before=before)
    async with draft_thread() as executor:
        stage = Stage("async", drafter, executor=executor)
        a = stage.open()
        stage.run_ahead.beside_step()
        await until(lambda: begun.acquire(blocking=False))
        stage.run_ahead._arm = "off"
        assert await stage.prepare() == 0
        gate.release()
        await until(lambda: len(stage.decoder._active["a"].tape) == 1)
        await settle()
        assert drafter.num_calls == 1
        assert await stage.step(a) == 1, "what it drafted is good whatever the arm"
        assert drafter.num_calls == 1


async def test_a_micro_step_that_is_out_when_the_arm_becomes_sync_is_waited_for() -> None:
    async with draft_thread() as executor:
        drafter = perfect()
        stage = Stage("async", drafter, executor=executor)
        a = stage.open()
        stage.run_ahead.beside_step()
        stage.run_ahead._arm = "sync"
        assert await stage.step(a) == LONGEST
        assert drafter.num_calls == LONGEST


# What is said of it.


def schedules(stage: Stage) -> list[tuple[str, str]]:
    return [(each.method, each.schedule) for each in stage.run_ahead.state().drafters]


def test_who_drafts_and_when() -> None:
    drafters = [
        perfect(method="ngram", is_cheap=True),
        perfect(),
        perfect(method="heads", reads_features=True),
    ]
    for schedule, expected in (
        ("sync", ["inline", "sync", "sync"]),
        ("async", ["async", "async", "sync"]),
        ("auto", ["inline", "auto", "auto"]),
    ):
        stage = Stage(cast(Schedule, schedule), *drafters)
        state = stage.run_ahead.state()
        assert schedules(stage) == list(zip(("ngram", "draft_model", "heads"), expected, strict=True))
        assert (state.why_off, state.schedule) == (None, schedule)
        assert {each.max_tokens for each in state.drafters} == {LONGEST}


async def test_a_schedule_that_was_measured_to_be_worse_is_the_reason() -> None:
    stage = Stage("auto", perfect())
    chooser = stage.run_ahead._chooser
    assert chooser is not None
    for _ in range(400):
        chooser.observe(1, 1, 0.01 if chooser.arm(1) == "off" else 0.05)
    state = stage.run_ahead.state()
    assert schedules(stage) == [("draft_model", "off")]
    assert state.why_off == "Steps without it are faster, as measured; it is tried now and then."


async def test_steps_that_no_drafter_serves_are_no_measurement_of_a_schedule() -> None:
    stage = Stage("auto", perfect())
    chooser = stage.run_ahead._chooser
    assert chooser is not None
    for _ in range(400):
        stage.run_ahead.choose_arm(1)
        stage.run_ahead.after_step(1, 1, 0.02)
    assert chooser.chosen is None
    a = stage.open()
    for _ in range(30):
        await stage.step(a)
    assert chooser.chosen is not None


async def test_a_drafter_that_fails_is_off_and_another_is_on() -> None:
    stage = Stage("sync", perfect(before=raising(ValueError("no"))), perfect(method="heads"))
    a = stage.open()
    for _ in range(5):
        await stage.step(a)
    failing, other = stage.run_ahead.state().drafters
    assert (failing.schedule, other.schedule, stage.run_ahead.state().why_off) == ("off", "sync", None)
    assert "failed several times" in str(failing.why_off)


def test_without_drafters_the_state_says_so() -> None:
    decoder = SpeculativeDecoder.without_drafters()
    state = RunAhead(decoder, InlineExecutor(), BatchMetrics(), ManualClock()).state()
    assert (state.drafters, state.why_off) == ((), decoder.why_off)
