"""The device of stated times does what the loop asks of one, in the time that was stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.following_steps import FollowingSteps
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.loop.engine_parts import AheadRunner
from engine.plan.step_records import NO_TOKEN, DraftInputs, Int64, UnreadDrafts
from tests.bench import stated_device
from tests.bench.stated_device import StatedDevice, StatedRunner, StepTimes
from tests.support.packed import load_tiny

STEP_S, SEQUENCE_S, TOKEN_S = 0.25, 0.125, 0.5


class Clock:
    """In place of the module `time`: nothing takes any but what is slept."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stated_device, "time", clock)
    return clock


def runner_of(device: StatedDevice, times: StepTimes, successors: Int64 | None = None) -> StatedRunner:
    loaded = load_tiny("llama")
    sampler = Sampler(loaded.vocab_size, loaded.device)
    plain = ModelRunner(loaded, 16, 4, sampler, 4, ForDrafts())
    runner = StatedRunner(plain, 64, GraphLimits(4, 16, 3), times, device, successors)
    assert isinstance(runner, AheadRunner)
    runner.warm_up()
    return runner


def test_steps_that_are_launched_ahead_last_as_long_as_stated_one_after_the_other(clock: Clock) -> None:
    runner = runner_of(StatedDevice(), StepTimes(STEP_S, SEQUENCE_S))
    inputs = pack_step([Part([5] * 8, 6, 7, [0, 1]), Part([5] * 8, 6, 7, [2, 3])], 4, temperature=1.0)
    first = runner.launch(inputs)
    second = runner.launch(replace(inputs, previous_rows=np.arange(2)))
    assert clock.now == 0, "the host goes on"
    step_s = STEP_S + 2 * SEQUENCE_S
    for number, step in enumerate((first, second), start=1):
        result = step.wait()
        assert clock.now == number * step_s
        assert result.forward_s == step_s
        assert result.rows.row_errors is None
        assert len(result.rows.token_ids) == 2 and min(result.rows.token_ids) >= 0


def test_two_models_share_a_device_and_many_tokens_take_their_time(clock: Clock) -> None:
    device = StatedDevice()
    target, draft = (runner_of(device, StepTimes(STEP_S, 0.0, TOKEN_S)) for _ in range(2))
    inputs = pack_step([Part([5] * 8, 2, 8, [0, 1])], 4)
    first, second = target.launch(inputs), draft.launch(inputs)
    assert second.wait().forward_s == 2 * 6 * TOKEN_S == clock.now, "it waits for the target's"
    assert first.wait().forward_s == 6 * TOKEN_S
    assert clock.now == 2 * 6 * TOKEN_S


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_chain_takes_a_step_for_each_token_and_follows_the_walk(clock: Clock, is_recorded: bool) -> None:
    successors = (np.arange(64) + 1) % 64
    runner = runner_of(StatedDevice(), StepTimes(STEP_S, SEQUENCE_S), successors)
    if not is_recorded:
        runner._runner.graphs._steps.clear()
    inputs = pack_step([Part([5] * 8, 5, 6, [0, 1, 2]), Part([9] * 8, 5, 6, [3, 4, 5])], 4)
    steps = FollowingSteps.behind(inputs, np.array([2, 4]), 4)
    assert steps is not None
    first, rest = runner.launch(inputs), runner.follow(steps)
    assert clock.now == 0, "the host goes on"
    assert first.wait().rows.token_ids == [6, 10]
    step_s = STEP_S + 2 * SEQUENCE_S
    assert clock.now == step_s
    drawn = rest.wait()
    assert clock.now == 5 * step_s
    assert drawn[:2, 0].tolist() == [7, 8] and drawn[:, 1].tolist() == [11, 12, 13, 14]


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_step_begins_when_the_drafts_are_there_that_the_host_has_not_read(
    clock: Clock, num_steps: int
) -> None:
    """Of two chains, the first is right but for its last token."""
    device, successors = StatedDevice(), (np.arange(64) + 1) % 64
    times = StepTimes(STEP_S, 0.0)
    wrong = successors.copy()
    wrong[5 + num_steps] = 60
    target, draft = runner_of(device, times, successors), runner_of(device, times, wrong)
    first = pack_step([Part([5] * 8, 5, 6, [0, 1, 2]), Part([20] * 8, 5, 6, [3, 4, 5])], 4)
    draft.launch(first)
    steps = FollowingSteps.behind(first, np.full(2, num_steps), 4)
    unread = draft.keep() if steps is None else draft.follow(steps).unread
    assert unread is not None
    count = 1 + num_steps
    tokens = ([5] + [NO_TOKEN] * count, [20] + [NO_TOKEN] * count)
    parts = [
        Part(own, 0, 1 + count, blocks, range(-1, num_steps))
        for own, blocks in zip(tokens, ([0, 1], [2, 3]), strict=True)
    ]
    inputs = pack_step(parts, 4)
    assert inputs.drafts is not None
    drafts = replace(inputs.drafts, unread=UnreadDrafts(unread.tokens, unread.places.ravel()))
    result = target.launch(replace(inputs, drafts=drafts)).wait()
    assert clock.now == (1 + num_steps) * STEP_S + STEP_S and result.forward_s == STEP_S
    right = [list(range(6, 6 + count)), list(range(21, 22 + count))]
    assert result.rows.token_ids == [*right[0], NO_TOKEN, *right[1]]


def test_what_another_device_drew_is_read_first() -> None:
    plain = runner_of(StatedDevice(), StepTimes(0.0, 0.0))
    plain._shares_device = False
    first = pack_step([Part([5] * 8, 5, 6, [0, 1, 2])], 4)
    plain.launch(first)
    steps = FollowingSteps.behind(first, np.array([2]), 4)
    assert steps is not None
    assert plain.keep() is None and plain.follow(steps).unread is None


def test_tokens_follow_each_other_as_the_walk_has_it_and_drafts_are_held_against_it() -> None:
    successors = (np.arange(64) + 1) % 64
    runner = runner_of(StatedDevice(), StepTimes(0.0, 0.0), successors)
    inputs = pack_step([Part([5] * 8, 6, 7, [0, 1]), Part([9] * 8, 6, 7, [2, 3])], 4)
    first = runner.launch(inputs)
    second = runner.launch(replace(inputs, token_ids=np.zeros(2, np.int64), previous_rows=np.arange(2)))
    assert first.wait().rows.token_ids == [6, 10]
    assert second.wait().rows.token_ids == [7, 11]
    drafted = pack_step([Part([5, 6, 7, 7], 0, 4, [0, 1])], 4)
    draws = pack_step([Part([5] * 8, place, place + 1, [0, 1]) for place in range(4)], 4).sampling
    drafts = DraftInputs(
        sequence=np.zeros(1, np.int32),
        first_row=np.zeros(1, np.int64),
        num_drafts=np.array([3], np.int32),
        token_ids=np.array([6, 7, 7]),
    )
    verified = replace(drafted, logits_rows=np.arange(4), sampling=draws, drafts=drafts)
    assert runner.run(verified).rows.token_ids == [6, 7, 8, NO_TOKEN]
