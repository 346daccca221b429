"""A runner that is launched ahead and goes wrong by plan: which step is hit, when it shows, and where."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from config import PlannedFault
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.faults.fault_counter import FaultCounter
from engine.faults.faulty_ahead_runner import FaultyAheadRunner, make_faulty
from engine.faults.faulty_runner import FaultyRunner
from engine.faults.faulty_sampler import CURSED
from engine.faults.step_owners import OwnedStep, StepOwners
from engine.loop.engine_parts import AheadRunner
from engine.plan.step_records import SampledRows, SamplingInputs, StepInputs, StepResult

LOADED: Any = SimpleNamespace(model=torch.nn.Identity())
DONE = StepResult(SampledRows([]), 0.25, 0.5)


@dataclass
class Recording:
    """An AheadRunner that keeps what it is given, and a step of it."""

    launched: list[StepInputs] = field(default_factory=list)
    drawn: list[SamplingInputs] = field(default_factory=list)

    def run(self, inputs: StepInputs) -> StepResult:
        return self.launch(inputs).wait()

    def launch(self, inputs: StepInputs) -> Recording:
        LOADED.model(SimpleNamespace(logits=torch.zeros(1, len(inputs.logits_rows), 8)))
        self.launched.append(inputs)
        return self

    def draw(self, sampling: SamplingInputs) -> None:
        self.drawn.append(sampling)

    def wait(self) -> StepResult:
        return DONE


@dataclass
class Bench:
    """A faulty runner over a recording one."""

    faulty: FaultyAheadRunner
    owners: StepOwners
    inner: Recording

    def decide(self, *numbers: int | None, later: bool = False) -> StepInputs:
        """A step that decodes a token of each of these requests."""
        parts = [Part([5, 6, 7], 2, 3, [row]) for row in range(len(numbers))]
        inputs = replace(pack_step(parts, 4), is_drawn_later=later)
        self.owners.note(inputs, numbers)
        return inputs


def bench(*faults: PlannedFault) -> Bench:
    LOADED.model = torch.nn.Identity()
    owners, inner = StepOwners(), Recording()
    faulty = make_faulty(FaultCounter(faults), owners, inner, LOADED)
    assert isinstance(faulty, FaultyAheadRunner)
    return Bench(faulty, owners, inner)


def test_it_is_launched_ahead_exactly_if_the_one_inside_is() -> None:
    assert isinstance(bench().faulty, AheadRunner)
    plain = SimpleNamespace(run=lambda _: DONE)
    found = make_faulty(FaultCounter([]), StepOwners(), plain, LOADED)
    assert isinstance(found, FaultyRunner) and not isinstance(found, AheadRunner)


def test_of_two_steps_decided_before_either_is_launched_each_keeps_its_owners() -> None:
    on = bench(PlannedFault("forward_raise", request=2, count=2))
    first, second = on.decide(1, 2), on.decide(1)
    steps = [on.faulty.launch(first), on.faulty.launch(second)]
    with pytest.raises(RuntimeError, match="has this pass fail"):
        steps[0].wait()
    assert steps[1].wait() == DONE


def test_a_step_that_never_came_shifts_no_fault_to_another() -> None:
    on = bench(PlannedFault("forward_raise", request=2))
    on.decide(2)  # behind one that could not be launched
    assert on.faulty.run(on.decide(1)) == DONE
    with pytest.raises(RuntimeError):
        on.faulty.run(on.decide(2))


def test_owners_are_of_the_very_object_and_of_the_last_two() -> None:
    owners = StepOwners()
    steps = [pack_step([Part([5], 0, 1, [0])], 4) for _ in range(3)]
    for number, inputs in enumerate(steps):
        owners.note(inputs, (number,))
    assert [owners.of(inputs).numbers for inputs in steps[1:]] == [(1,), (2,)]
    with pytest.raises(StopIteration):
        owners.of(steps[0])


def test_first_rows_are_told_with_their_owners() -> None:
    parts = [Part([5] * 9, 0, 3, [0]), Part([5] * 9, 4, 7, [1, 2], (-1, 0)), Part([5] * 9, 2, 4, [3])]
    inputs = pack_step(parts, 4)
    step = OwnedStep(replace(inputs, logits_rows=inputs.logits_rows[1:]), (1, 2, 3))
    assert list(step.drawn()) == [(0, 2), (3, 3)]


def test_a_failure_shows_in_the_wait_and_the_pass_computed_something_else() -> None:
    on = bench(PlannedFault("forward_raise"))
    inputs = replace(on.decide(1, 2), previous_rows=np.array([0, -1]))
    on.owners.note(inputs, (1, 2))
    step = on.faulty.launch(inputs)
    (given,) = on.inner.launched
    assert given.token_ids.tolist() == [0, 0] and given.previous_rows is None
    assert given.slot_mapping is inputs.slot_mapping
    with pytest.raises(RuntimeError, match="has this pass fail"):
        step.wait()
    assert on.faulty.run(inputs) == DONE
    assert on.inner.launched[1].token_ids is inputs.token_ids


def test_memory_ends_in_the_launch() -> None:
    on = bench(PlannedFault("forward_oom"))
    inputs = on.decide(1)
    with pytest.raises(torch.OutOfMemoryError):
        on.faulty.launch(inputs)
    assert on.faulty.launch(inputs).wait() == DONE


def test_of_both_the_pass_fails_as_the_plain_runner_has_it() -> None:
    on = bench(PlannedFault("forward_oom"), PlannedFault("forward_raise"))
    with pytest.raises(RuntimeError, match="has this pass fail"):
        on.faulty.launch(on.decide(1)).wait()


def test_sleep_holds_no_launch_but_the_step_and_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 10.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr("engine.faults.faulty_ahead_runner.time", clock)
    on = bench(PlannedFault("forward_sleep", at=1, seconds=2), PlannedFault("forward_sleep", at=2, seconds=1))
    first, second, third = (on.faulty.launch(on.decide(1)) for _ in range(3))
    assert slept == [] and now == 10.0
    assert first.wait().forward_s == DONE.forward_s + 2 and now == 12.0
    now += 0.25
    assert second.wait().forward_s == DONE.forward_s + 1 and now == 13.0
    assert third.wait() == DONE and now == 13.0


def test_rows_drawn_at_once_or_later_are_marked_for_the_sampler() -> None:
    fault = PlannedFault("sampler_raise", request=2, count=2)
    on = bench(fault)
    on.faulty.run(on.decide(1, 2))
    assert on.inner.launched[0].sampling.top_k.tolist() == [0, CURSED]
    inputs = on.decide(2, 1, later=True)
    step = on.faulty.launch(inputs)
    assert on.inner.launched[1].sampling is inputs.sampling
    step.draw(inputs.sampling)
    assert on.inner.drawn[0].top_k.tolist() == [CURSED, 0]
    assert inputs.sampling.top_k.tolist() == [0, 0], "what others read stays as it was"


def test_rows_that_are_not_finite_are_those_of_the_step_that_is_launched() -> None:
    on = bench(PlannedFault("logits_nan", request=2))
    seen = list[list[bool]]()
    LOADED.model.register_forward_hook(lambda _, __, out: seen.append(out.logits[0, :, 0].isnan().tolist()))
    first, second = on.decide(1, 3), on.decide(3, 2)
    on.faulty.launch(first)
    on.faulty.launch(second)
    on.faulty.launch(second)
    assert seen == [[False, False], [False, True], [False, False]]


def test_a_pass_that_fails_is_no_hit_of_its_rows() -> None:
    on = bench(PlannedFault("forward_raise"), PlannedFault("logits_nan"))
    seen = list[bool]()
    LOADED.model.register_forward_hook(lambda _, __, out: seen.append(bool(out.logits.isnan().any())))
    inputs = on.decide(1)
    on.faulty.launch(inputs)
    on.faulty.launch(inputs)
    assert seen == [False, True]


def test_the_clock_that_it_waits_by_is_monotonic() -> None:
    on = bench(PlannedFault("forward_sleep", seconds=0.02))
    began = time.monotonic()
    on.faulty.run(on.decide(1))
    assert time.monotonic() - began >= 0.02
