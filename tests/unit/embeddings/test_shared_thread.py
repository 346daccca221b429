"""SharedThread: which of a pass and of steps runs when, on a clock of the test's own."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest

from engine.embeddings.shared_thread import GAP_LIMIT_S, LEAST_TURN_S, SharedThread

PIECE_S = 0.01


class Play:
    """A thread whose calls take as long as they say, and what ended when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ends: list[tuple[str, float]] = []
        self.thread = SharedThread(GAP_LIMIT_S, lambda: self.now)

    def step(self, seconds: float, name: str = "step") -> Future[None]:
        def run() -> None:
            self.now += seconds
            self.ends.append((name, self.now))

        return self.thread.submit(run)

    def run_pass(self, num_pieces: int, step_s: float) -> None:
        """A pass beside which the next step comes as soon as one has ended, as streams have it."""
        steps = [self.step(step_s)]

        def run() -> None:
            for _ in range(num_pieces):
                self.now += PIECE_S
                self.thread.give_way()
                if steps[-1].done():
                    steps.append(self.step(step_s))
            self.ends.append(("pass", self.now))

        self.thread.submit_pass(run).result(timeout=10)
        for each in steps:
            each.result(timeout=10)

    def gaps(self) -> list[float]:
        """From one step's end to the next one's."""
        ends = [at for name, at in self.ends if name == "step"]
        return [after - before for before, after in pairwise(ends)]


@pytest.fixture
def play() -> Any:
    found = Play()
    yield found
    found.thread.shutdown()


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.025, 0.06, GAP_LIMIT_S - LEAST_TURN_S - 0.02])
def test_no_stream_waits_longer_than_the_gap(play: Play, step_s: float) -> None:
    play.run_pass(100, step_s)
    gaps = play.gaps()
    assert len(gaps) > 3
    assert max(gaps[:-1]) <= GAP_LIMIT_S + 1e-9


@pytest.mark.parametrize("step_s", [0.01, 0.025, 0.1])
def test_a_pass_gets_on_beside_steps(play: Play, step_s: float) -> None:
    play.run_pass(100, step_s)
    took = dict(play.ends)["pass"] - 100.0
    assert 100 * PIECE_S < took < 100 * PIECE_S * (1 + step_s / LEAST_TURN_S) + 2 * step_s


def test_a_step_that_comes_late_goes_at_once(play: Play) -> None:
    def run() -> None:
        for piece in range(50):
            play.now += PIECE_S
            if piece == 30:
                play.step(0.01)
            play.thread.give_way()

    play.thread.submit_pass(run).result(timeout=10)
    ((name, at),) = play.ends
    assert name == "step" and at == pytest.approx(100 + 31 * PIECE_S + 0.01)


def test_the_order_and_the_errors_of_steps_are_kept(play: Play) -> None:
    held = threading.Event()
    play.thread.submit_pass(held.wait)

    def fail() -> None:
        raise ValueError("a step's own")

    futures = [play.step(0.0, "a"), play.thread.submit(fail), play.step(0.0, "b")]
    held.set()
    with pytest.raises(ValueError, match="a step's own"):
        futures[1].result(timeout=10)
    futures[2].result(timeout=10)
    assert [name for name, _ in play.ends] == ["a", "b"]


def test_after_the_end_nothing_is_taken() -> None:
    thread = SharedThread(GAP_LIMIT_S)
    held = threading.Event()
    thread.submit_pass(held.wait)
    waiting = thread.submit(lambda: None)
    thread.shutdown(wait=False, cancel_futures=True)
    held.set()
    thread.shutdown()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        thread.submit(lambda: None)
