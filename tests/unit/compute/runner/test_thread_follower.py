"""With how many threads steps run, on a machine whose passes take what is said of its neighbours."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import cast

import pytest

from engine.compute.native.team import ComputeTeam
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.thread_follower import ThreadFollower, fewer_and_fewer
from engine.plan.step_records import SampledRows, StepInputs, StepResult


class FakeTeam:
    """Knows how many threads take part."""

    def __init__(self, size: int) -> None:
        self.size = self.members = size

    def limit(self, count: int) -> None:
        assert 1 <= count <= self.size
        self.members = count


class Machine:
    """Cores, of which some belong to others, and a clock that passes move on."""

    def __init__(self, cores: int = 2, *, noise: float = 0.0, seed: int = 0) -> None:
        self.cores = cores
        self.busy = 0  # of them
        self.context_s = 0.0  # what each pass takes longer for its context
        self.now = 0.0
        self.ran: list[tuple[float, int, int]] = []  # when, tokens, threads
        self._rng, self._noise = random.Random(seed), noise
        self.team = FakeTeam(cores)
        self.follower = ThreadFollower(self, cast(ComputeTeam, self.team), lambda: self.now)

    def pass_s(self, num_tokens: int, threads: int) -> float:
        """A thread that shares a core makes all of them wait for half of the time and more."""
        alone = 0.014 * (1 + num_tokens / 100) + self.context_s
        has_to_share = threads + self.busy > self.cores
        wait = (1.0 if threads == 1 else 2.2) if has_to_share else 1.0
        half = 2.0 if self.busy >= self.cores else 1.0  # of a core, where none is free
        return alone / threads * wait * half * (1 + self._noise * self._rng.uniform(-1, 1))

    def run(self, inputs: StepInputs) -> StepResult:
        """A step of the machine itself."""
        num_tokens = len(inputs.token_ids)
        seconds = self.pass_s(num_tokens, self.team.members)
        self.now += seconds
        self.ran.append((self.now, num_tokens, self.team.members))
        return StepResult(SampledRows([]), seconds, 0.0)

    def serve(self, seconds: float, num_tokens: Callable[[], int] = lambda: 1) -> Counter[int]:
        """How many passes ran with how many threads."""
        until, first = self.now + seconds, len(self.ran)
        while self.now < until:
            self.follower.run(step_of(num_tokens()))
        return Counter(threads for _, _, threads in self.ran[first:])


class Broken:
    """Fails."""

    def run(self, inputs: StepInputs) -> StepResult:
        """Never a result."""
        raise RuntimeError("broken")


@cache
def step_of(num_tokens: int) -> StepInputs:
    parts = [Part([0], 0, 1, range(row, row + 1)) for row in range(num_tokens)]
    return pack_step(parts, 16)


def test_numbers_that_are_tried() -> None:
    assert fewer_and_fewer(1) == (1,)
    assert fewer_and_fewer(2) == (2, 1)
    assert fewer_and_fewer(8) == (8, 7, 5, 4, 3, 2, 1)


@pytest.mark.parametrize("noise", [0.2, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_quiet_machine_has_all_threads_and_is_hardly_ever_tried(noise: float) -> None:
    machine = Machine(noise=noise)
    ran = machine.serve(300)
    assert machine.follower.num_threads == 2
    assert ran[1] <= 15, "a few passes in five minutes"


@pytest.mark.parametrize("cores", [2, 8])
def test_it_gives_way_to_a_neighbour_and_comes_back(cores: int) -> None:
    machine = Machine(cores, noise=0.05)
    machine.serve(10)
    machine.busy = 1
    machine.serve(3)
    assert machine.follower.num_threads == cores - 1
    machine.serve(30)
    assert machine.follower.num_threads == cores - 1
    machine.busy = 0
    machine.serve(3)
    assert machine.follower.num_threads == cores


def test_it_comes_back_at_once_where_passes_become_quicker() -> None:
    machine = Machine()
    machine.serve(10)
    machine.busy = 2
    machine.serve(20)
    assert machine.follower.num_threads == 1
    machine.busy = 0
    machine.serve(0.8)
    assert machine.follower.num_threads == 2


def test_it_follows_further_and_all_the_way_back() -> None:
    machine = Machine(8)
    machine.serve(10)
    machine.busy = 4
    machine.serve(10)
    assert machine.follower.num_threads == 4
    machine.busy = 0
    machine.serve(10)
    assert machine.follower.num_threads == 8


def test_who_has_fewer_tries_more_for_little() -> None:
    machine = Machine()
    machine.serve(10)
    machine.busy = 1
    machine.serve(3)
    ran = machine.serve(60)
    assert ran[2] / ran.total() < 0.1


def test_steps_of_many_sizes_are_compared_with_their_like() -> None:
    machine = Machine(noise=0.1)
    sizes = random.Random(1)
    draw = lambda: sizes.choice([1, 2, 5, 9, 40])  # noqa: E731
    quiet = machine.serve(60, draw)
    assert quiet[1] <= 10
    machine.busy = 1
    machine.serve(4, draw)
    assert machine.follower.num_threads == 1


def test_a_context_that_grows_is_no_neighbour() -> None:
    machine = Machine()
    machine.serve(5)
    for _ in range(100):
        machine.context_s += 0.0005
        ran = machine.serve(1)
        assert ran[1] <= 3
    assert machine.follower.num_threads == 2


def test_passes_of_many_tokens_have_all_threads() -> None:
    machine = Machine()
    machine.serve(10)
    machine.busy = 1
    machine.serve(3)
    machine.follower.run(step_of(65))
    assert machine.ran[-1][2] == 2
    machine.follower.run(step_of(64))
    assert machine.ran[-1][2] == 1


def test_a_step_that_fails_fails_and_the_next_runs() -> None:
    machine = Machine()
    follower = ThreadFollower(Broken(), cast(ComputeTeam, machine.team), lambda: 0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            follower.run(step_of(1))
