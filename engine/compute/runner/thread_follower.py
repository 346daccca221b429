"""ThreadFollower: computes with as many threads as the cores have time for, measured while it serves."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.compute.native.team import ComputeTeam
from engine.plan.step_records import StepInputs, StepResult

log = logging.getLogger("slipstream.model")

_FEW_TOKENS = 64  # of a pass whose threads meet often; those of longer ones have large pieces to share
_MEMORY, _LONG_MEMORY = 16, 4096  # passes that means look back to
_SETTLED_PASSES = 64  # with which a pace that has changed is known
_SLOWER, _QUICKER = 1.15, 0.87  # times the pace at the last comparison: cores were taken, or given back
_FASTER = 0.95  # of the time with the number in use: less may be chance
_TRIED_PASSES = 8
_FEWER_PASSES, _NO_BETTER = 3, 1.3  # so many will do where they take so many times as long
_HOPELESS = 2.0  # times as long: still smaller numbers are not tried
_NONE = (math.inf, 0)  # ratio and place of the best number before any was tried
_LEAST_WAIT_S, _RETURN_WAIT_S, _FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 2.0, 30.0, 120.0


class Runner(Protocol):
    """What runs a step."""

    def run(self, inputs: StepInputs) -> StepResult:
        """One step."""


class _Paces:
    """What passes take by how many tokens they have, of late over what is usual."""

    def __init__(self) -> None:
        self.pace = 1.0  # seconds that a usual second takes now
        self._usual: dict[int, float] = {}  # seconds, which follow slowly what grows slowly, as contexts do
        self._count = 0

    @property
    def is_known(self) -> bool:
        """True once enough passes were seen."""
        return self._count >= _MEMORY

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One more pass."""
        self._count += 1
        usual = self._usual.setdefault(num_tokens, seconds / self.pace)
        self.pace += (seconds / usual - self.pace) / _MEMORY
        self._usual[num_tokens] += (seconds - usual) / _LONG_MEMORY

    def expected_s(self, num_tokens: int) -> float | None:
        """Seconds of a pass; None where none of as many tokens was seen."""
        usual = self._usual.get(num_tokens)
        return None if usual is None else self.pace * usual


@dataclass(slots=True)
class _Trial:
    """Passes with another number of threads: what they took, and what they would have taken."""

    seconds: float = 0.0
    expected_s: float = 0.0
    passes: int = 0

    def observe(self, seconds: float, expected_s: float | None) -> None:
        """One more pass, which counts if it is known what to expect."""
        self.passes += 1
        if expected_s is not None:
            self.seconds += seconds
            self.expected_s += expected_s

    @property
    def ratio(self) -> float:
        """What they took over what they would have."""
        return self.seconds / self.expected_s if self.expected_s else 1.0

    @property
    def is_over(self) -> bool:
        """True once it can be judged."""
        return self.passes >= (_FEWER_PASSES if self.ratio > _NO_BETTER else _TRIED_PASSES)


class ThreadFollower:
    """Runs the steps of `runner` with all threads of `team` or with fewer. Target thread only.

    Threads meet several times in a layer. When another process takes the core of one for some milliseconds,
    all wait for it, so under a busy neighbour fewer may be faster. Where passes have become slower, or a long
    time has gone by, some are run with each smaller number; where fewer run, the next greater one is tried
    every other second, or when passes become quicker. Passes of many tokens always have all threads. The
    number changes no token.
    """

    def __init__(
        self,
        runner: Runner,
        team: ComputeTeam,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.team = team
        self._clock = clock
        self._counts = fewer_and_fewer(team.size)
        self._place = 0  # of the number in use
        self._paces = _Paces()
        self._places: list[int] = []  # of the numbers still to be tried in a comparison, the first one now
        self._trial, self._best = _Trial(), _NONE
        self._compared_at, self._pace_then = clock(), 1.0
        self._slower_passes = 0  # in a row
        self._wait_s = _FIRST_WAIT_S  # until numbers are compared again

    @property
    def num_threads(self) -> int:
        """How many compute passes of few tokens, trials left out."""
        return self._counts[self._place]

    def run(self, inputs: StepInputs) -> StepResult:
        """One step; raises what the runner raises."""
        num_tokens = len(inputs.token_ids)
        if num_tokens > _FEW_TOKENS:
            self.team.limit(self._counts[0])
            return self.runner.run(inputs)
        if not self._places:
            self._places = self._due_places()
        self.team.limit(self._counts[self._places[0] if self._places else self._place])
        result = self.runner.run(inputs)
        if self._places:
            self._observe_trial(num_tokens, result.forward_s)
        else:
            self._paces.observe(num_tokens, result.forward_s)
            is_slower = self._paces.pace > _SLOWER * self._pace_then
            self._slower_passes = self._slower_passes + 1 if is_slower else 0
        return result

    def _due_places(self) -> list[int]:
        """Places of the numbers to try now, in turn: the next greater one, and smaller ones if it is slow.

        Smaller ones are all tried: where several cores are taken, one thread less is as slow.
        """
        waited_s = self._clock() - self._compared_at
        is_slower = self._slower_passes >= _SETTLED_PASSES
        is_quicker = self._place > 0 and self._paces.pace < _QUICKER * self._pace_then
        wait_s = _LEAST_WAIT_S if is_slower or is_quicker else self._wait_s
        if not self._paces.is_known or waited_s < wait_s:
            return []
        greater = [self._place - 1] if self._place else []
        smaller = range(self._place + 1, len(self._counts)) if is_slower or not greater else ()
        return [*greater, *smaller]

    def _observe_trial(self, num_tokens: int, seconds: float) -> None:
        """One more pass with another number; the last one of a comparison decides."""
        trial, place = self._trial, self._places[0]
        trial.observe(seconds, self._paces.expected_s(num_tokens))
        if not trial.is_over:
            return
        self._best = min(self._best, (trial.ratio, place))
        self._trial = _Trial()
        is_hopeless = place > self._place and trial.ratio > _HOPELESS
        self._places = [] if is_hopeless else self._places[1:]
        if not self._places:
            self._decide(*self._best)

    def _decide(self, ratio: float, place: int) -> None:
        """End a comparison whose best number of threads takes `ratio` of the time."""
        self._best = _NONE
        is_better = ratio < _FASTER
        if is_better:
            self._place = place
            self._paces.pace *= ratio
            log.debug("%d compute threads: passes take %.2f of the time", self.num_threads, ratio)
        if self._place:
            self._wait_s = _LEAST_WAIT_S if is_better else min(2 * self._wait_s, _RETURN_WAIT_S)
        else:
            self._wait_s = _FIRST_WAIT_S if is_better else min(2 * self._wait_s, _MOST_WAIT_S)
        self._compared_at, self._pace_then = self._clock(), self._paces.pace
        self._slower_passes = 0


def fewer_and_fewer(size: int) -> tuple[int, ...]:
    """Numbers of threads worth a try: all, one less, then about three quarters of the last each time, 1."""
    counts = [size]
    while counts[-1] > 1:
        counts.append(min(counts[-1] - 1, round(0.75 * counts[-1])) if len(counts) > 1 else size - 1)
    return tuple(counts)
