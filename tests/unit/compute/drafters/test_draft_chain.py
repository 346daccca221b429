"""Chains of drafts over a runner that answers at once: which steps are launched, and what comes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.compute.drafters.draft_chain import draw_chains
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.following_steps import FollowingSteps, owners_of
from engine.plan.step_records import Int64, SampledRows, StepInputs, StepResult

BLOCK_SIZE = 4


class CountingRunner:
    """After token t it draws t + 1. Knows how many steps are under way, and which were launched."""

    def __init__(self) -> None:
        self.steps: list[StepInputs] = []
        self.under_way = 0
        self.fails_at: int | None = None
        self.wait_fails_at: int | None = None
        self.row_errors: dict[int, dict[int, str]] = {}  # by step
        self._drawn = np.zeros(0, np.int64)

    kv = None

    def launch(self, inputs: StepInputs) -> CountingStep:
        number = len(self.steps)
        self.steps.append(inputs)
        if number == self.fails_at:
            raise RuntimeError("no launch")
        tokens = inputs.token_ids.copy()
        if inputs.previous_rows is not None:
            known = inputs.previous_rows >= 0
            tokens[known] = self._drawn[inputs.previous_rows[known]]
        self._drawn = tokens[inputs.logits_rows] + 1
        self.under_way += 1
        rows = SampledRows(self._drawn.tolist(), row_errors=self.row_errors.get(number))
        return CountingStep(self, number, StepResult(rows, 0.0, 0.0))

    def follow(self, steps: FollowingSteps) -> CountingRest:
        before = self.under_way
        try:
            apart = [self.launch(steps.step(number)) for number in range(len(steps))]
        except RuntimeError:
            self.under_way = before  # as the device is done with those launched
            raise
        return CountingRest(apart, steps)


class CountingStep:
    def __init__(self, runner: CountingRunner, number: int, result: StepResult) -> None:
        self._runner, self._number, self._result = runner, number, result

    def wait(self) -> StepResult:
        self._runner.under_way -= 1
        if self._number == self._runner.wait_fails_at:
            raise RuntimeError("no result")
        return self._result


class CountingRest:
    def __init__(self, apart: list[CountingStep], steps: FollowingSteps) -> None:
        self._apart, self._goes_on = apart, steps.slots >= 0

    def wait(self) -> Int64:
        drawn = np.full(self._goes_on.shape, -1)
        results = [self._apart.pop(0).wait for _ in range(len(self._apart))]
        failure = None
        for tokens, goes_on, wait in zip(drawn, self._goes_on, results, strict=True):
            try:
                rows = wait().rows
            except RuntimeError as error:
                failure = error
                continue
            errors = rows.row_errors or {}
            tokens[goes_on] = [-1 if row in errors else token for row, token in enumerate(rows.token_ids)]
        if failure is not None:
            raise failure
        return drawn


def first_step() -> StepInputs:
    """Two that decode at 6 and 3, one that reads and draws, one that only reads; in blocks of their own."""
    parts = [
        Part(range(100, 120), 6, 7, (5, 6, 7)),
        Part(range(200, 220), 3, 4, (1, 2)),
        Part(range(300, 320), 0, 5, (3, 4)),
        Part(range(400, 420), 0, 3, (8,)),
    ]
    inputs = pack_step(parts, BLOCK_SIZE)
    sampling = replace(inputs.sampling, position=inputs.sampling.position[:3])
    columns = {name: getattr(sampling, name)[:3] for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling = replace(sampling, **columns, seed=np.arange(3), num_logprobs=sampling.num_logprobs[:3])
    return replace(inputs, logits_rows=inputs.logits_rows[:3], sampling=sampling)


def test_rows_are_of_the_sequences_that_draw() -> None:
    assert owners_of(first_step()).tolist() == [0, 1, 2]
    inputs = replace(first_step(), logits_rows=first_step().logits_rows[[0, 2]])
    assert owners_of(inputs).tolist() == [0, 2]


def test_every_step_computes_what_the_last_one_drew() -> None:
    runner = CountingRunner()
    drawn = draw_chains(runner, first_step(), [3, 1, 2], BLOCK_SIZE)  # type: ignore[arg-type]
    assert drawn == [[107, 108, 109], [204], [305, 306]]
    assert [step.positions.tolist() for step in runner.steps[1:]] == [[7, 5], [8]]
    assert [step.kv_lens.tolist() for step in runner.steps[1:]] == [[8, 6], [9]]
    assert [step.slot_mapping.tolist() for step in runner.steps[1:]] == [[6 * 4 + 3, 4 * 4 + 1], [7 * 4]]
    previous = [step.previous_rows for step in runner.steps[1:]]
    assert [rows.tolist() for rows in previous if rows is not None] == [[0, 2], [0]]
    assert [step.sampling.position.tolist() for step in runner.steps] == [[7, 4, 5], [8, 6], [9]]
    assert [step.sampling.seed.tolist() for step in runner.steps] == [[0, 1, 2], [0, 2], [0]]


def test_the_device_has_every_step_before_the_first_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CountingRunner()
    seen: list[int] = []
    wait = CountingStep.wait

    def waited(step: CountingStep) -> StepResult:
        seen.append(runner.under_way)
        return wait(step)

    monkeypatch.setattr(CountingStep, "wait", waited)
    draw_chains(runner, first_step(), [5, 5, 3], BLOCK_SIZE)  # type: ignore[arg-type]
    assert seen == [5, 4, 3, 2, 1] and runner.under_way == 0


def test_a_row_that_fails_once_has_no_chain_and_the_others_have_theirs() -> None:
    runner = CountingRunner()
    runner.row_errors[1] = {0: "not finite"}
    drawn = draw_chains(runner, first_step(), [3, 2, 1], BLOCK_SIZE)  # type: ignore[arg-type]
    assert drawn == [None, [204, 205], [305]]


@pytest.mark.parametrize("name", ["fails_at", "wait_fails_at"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_nothing_is_under_way_after_a_failure(name: str, number: int) -> None:
    runner = CountingRunner()
    setattr(runner, name, number)
    with pytest.raises(RuntimeError, match="no "):
        draw_chains(runner, first_step(), [3, 3, 3], BLOCK_SIZE)  # type: ignore[arg-type]
    assert runner.under_way == 0


def test_a_chain_of_one_has_nothing_behind_it() -> None:
    inputs = first_step()
    assert FollowingSteps.behind(inputs, np.zeros(3, np.int64), BLOCK_SIZE) is None
    runner = CountingRunner()
    assert draw_chains(runner, inputs, [1, 1, 1], BLOCK_SIZE) == [[107], [204], [305]]  # type: ignore[arg-type]


def test_a_following_step_has_one_token_of_each_row() -> None:
    inputs = first_step()
    steps = FollowingSteps.behind(inputs, np.array([0, 0, 1]), BLOCK_SIZE)
    assert steps is not None and (len(steps), steps.num_rows) == (1, 1)
    following = steps.step(0)
    assert following.block_tables.tolist() == inputs.block_tables[[2]].tolist()
    assert following.query_lens.tolist() == [1] and following.logits_rows.tolist() == [0]
    assert following.drafts is None and following.sampling.num_rows == 1


def test_a_row_that_has_ended_stores_nothing() -> None:
    steps = FollowingSteps.behind(first_step(), np.array([3, 0, 1]), BLOCK_SIZE)
    assert steps is not None
    assert steps.previous_rows.tolist() == [0, 2]
    assert steps.positions.tolist() == [[7, 5], [8, 0], [9, 0]]
    assert steps.slots.tolist() == [[27, 17], [28, -1], [29, -1]]
    assert steps.all_rows().position.tolist() == [8, 6, 9, 1, 10, 1]
    assert steps.all_rows().seed.tolist() == [0, 2] * 3
