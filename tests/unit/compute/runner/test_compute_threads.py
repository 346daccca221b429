"""Which number of threads is chosen, by a step whose time is made up."""

from collections.abc import Iterator

import pytest
import torch

from engine.compute.runner.compute_threads import ThreadChoice, choose_threads, fastest
from engine.compute.runner.packed_forward import PackedForward
from tests.support.packed import as_loaded
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock, and a step that takes what is said for the number of threads it runs with."""

    def __init__(self, seconds: dict[int, float], first_run_s: float = 0.0) -> None:
        self.now = 0.0
        self.runs: list[int] = []
        self._seconds = seconds
        self._first_run_s = first_run_s

    def step(self) -> None:
        count = torch.get_num_threads()
        self.now += self._seconds[count] + self._first_run_s * (count not in self.runs)
        self.runs.append(count)

    def choose(self, *counts: int) -> ThreadChoice:
        return fastest(self.step, counts, torch.set_num_threads, lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({4: 0.010, 2: 0.012, 3: 0.013}, 4),
        ({4: 0.010, 2: 0.007, 3: 0.008}, 2),
        ({4: 0.010, 2: 0.0097, 3: 0.02}, 4),  # no clear lead
        ({4: 0.010, 2: 0.0097, 3: 0.009}, 3),
    ],
)
def test_the_fastest_is_chosen_and_set(seconds: dict[int, float], chosen: int) -> None:
    choice = Machine(seconds).choose(4, 2, 3)
    assert choice.count == chosen == torch.get_num_threads()
    assert choice.seconds == pytest.approx(seconds)


def test_making_the_threads_does_not_count() -> None:
    assert Machine({2: 0.01, 1: 0.02}, first_run_s=0.1).choose(2, 1).seconds[2] == pytest.approx(0.01)


def test_what_is_far_behind_is_run_once() -> None:
    machine = Machine({2: 0.01, 1: 0.02})
    machine.choose(2, 1)
    assert machine.runs == [2] * 4 + [1] * 2


def test_nothing_more_is_tried_after_the_time_limit() -> None:
    machine = Machine({8: 1.0, 4: 0.5, 7: 0.5})
    assert machine.choose(8, 4, 7).count == 8
    assert set(machine.runs) == {8}


def test_one_number_needs_no_measuring() -> None:
    choice = choose_threads(as_loaded(tiny_model("llama")), (1,))
    assert (choice, str(choice)) == (ThreadChoice(1, {}), "1")
    assert torch.get_num_threads() == 1


def test_a_real_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    call = PackedForward.__call__

    def noting(forward: PackedForward, *args: object) -> torch.Tensor:
        ran.append(torch.get_num_threads())
        return call(forward, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedForward, "__call__", noting)
    choice = choose_threads(as_loaded(tiny_model("llama")), (2, 1), lambda: 0.0)
    assert set(ran) == {2, 1} == set(choice.seconds)
    assert str(choice).startswith(f"{choice.count}: a step takes ")


def test_a_model_that_keeps_states_is_measured_too() -> None:
    choice = choose_threads(as_loaded(tiny_model("qwen3_5_hybrid")), (2, 1), lambda: 0.0)
    assert set(choice.seconds) == {2, 1}
