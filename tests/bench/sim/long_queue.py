"""What a long queue costs: the one experiment here that measures real time."""

from __future__ import annotations

import gc
import random
import statistics
from time import perf_counter

from engine.plan.request import FinishReason, Request
from engine.plan.step_records import SampledRows
from tests.bench.report import Bar, Section
from tests.bench.sim.policies import POLICIES
from tests.bench.sim.server import ANY_TOKEN, Server, make_request
from tests.bench.sim.trace import Arrival

FEW, MANY = 100, 10_000
SEATS = 8


class QueuedServer:
    """A batcher with every seat taken and `num_waiting` requests behind."""

    def __init__(self, policy: str, num_waiting: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now = 0.0
        self._number = 0
        self._batcher = Server(policy=policy, aging_s=60.0, max_num_seqs=SEATS).make_batcher(
            lambda: self._now
        )
        for _ in range(num_waiting + SEATS):
            self._batcher.add(self._next_request())
        self._step()

    def cycle_s(self) -> float:
        """One request ends and one comes; the seconds of that `add` and of the step that seats the next."""
        self._batcher.finish(self._seated, FinishReason.ABORT)
        request = self._next_request()
        start = perf_counter()
        self._batcher.add(request)
        return self._step(start)

    def _step(self, start: float = 0.0) -> float:
        decision = self._batcher.step()
        seconds = perf_counter() - start
        assert decision.inputs is not None and len(decision.scheduled) == SEATS
        self._batcher.commit(decision, SampledRows([ANY_TOKEN] * len(decision.inputs.logits_rows)))
        self._seated = decision.scheduled[0].request_id
        return seconds

    def _next_request(self) -> Request:
        """Ranks at random by every policy, so that it may sink anywhere into a heap."""
        draw = self._rng.randrange
        self._now += 1.0
        self._number += 1
        arrival = Arrival(
            self._now, 16, 500 + draw(1000), f"tenant {draw(8)}", draw(-10, 11), 1.0 + draw(10**6)
        )
        return make_request(self._number, arrival, Server())


def run_queue(num_cycles: int, seed: int = 7) -> Section:
    """Enqueue and step with a long queue against a short one, by turns, for every policy."""
    section = Section("queue", f"enqueue + step with {MANY:,} waiting against {FEW}, in real time")
    ratios = []
    for policy in POLICIES:
        few, many = (QueuedServer(policy, num_waiting, seed) for num_waiting in (FEW, MANY))
        few_s, many_s = _times(few, many, num_cycles)
        ratios.append(many_s / few_s)
        section.add(policy, f"{FEW} waiting", "us", [1e6 * few_s])
        section.add(policy, f"{MANY:,} waiting", "us", [1e6 * many_s])
        section.add(policy, "ratio", "x", [ratios[-1]])
    section.bars.append(Bar("enqueue + step, worst policy", 2.0, "x", max(ratios), at_least=False))
    section.notes.append(
        "medians of cycles taken by turns, the garbage collector off; every cycle turns over a seat"
    )
    return section


def _times(few: QueuedServer, many: QueuedServer, num_cycles: int) -> tuple[float, float]:
    """The median cycle of each, in seconds."""
    gc.collect()
    gc.disable()
    try:
        pairs = [(few.cycle_s(), many.cycle_s()) for _ in range(num_cycles)]
    finally:
        gc.enable()
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
