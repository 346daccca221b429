"""Cell: one pair, one way of drafting, and the tokens per unit of time that the real loop gets out of them.

A unit is the time of the target's pass, whatever that computes; the drafter's micro-step takes a set part
of it, whatever its rows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from engine.loop.engine import Engine
from engine.plan.metrics.batch_metrics import EngineGauges
from engine.plan.request import GenerationRequest, SamplingParams
from engine.plan.speculation.recent_gain import expected_tokens, theoretical_speedup
from engine.plan.speculation.speculation_config import LengthPolicyName
from tests.bench.sim_spec.pair import SetDrafter, SetTarget
from tests.support.engines import EngineShape, make_parts
from tests.support.virtual_time import run_in_virtual_time

UNIT_S = 0.02
WARM_UP = 10  # units
NUM_WINDOWS = 16  # of a run, to know how far its figures can be trusted
BLOCK_SIZE = 256
_HAIR = 1e-6  # by which a micro-step is shorter: what is done when the pass ends is done in time


def free_speedup(gamma: int, alpha: float, *, slowdown: float = 1.0) -> float:
    """Draft ahead and never wait: E / (s (1 + alpha - alpha^(gamma+1))); a step after a miss has no drafts.

    `slowdown` s is that of the target while the drafter runs beside it. The formula holds while a target step
    lasts long enough for gamma + 1 drafts.
    """
    return expected_tokens(gamma, alpha) / (slowdown * (1 + alpha - alpha ** (gamma + 1)))


@dataclass(frozen=True, slots=True)
class Cell:
    """`cost_ratio` is a micro-step over a pass; `slowdown` that of a pass beside the drafter.

    At most `max_drafts` are verified of a sequence, or always so many where the `policy` is "fixed".
    """

    alpha: float
    cost_ratio: float
    max_drafts: int
    num_seqs: int
    schedule: Literal["off", "sync", "async", "auto"]
    slowdown: float = 1.0
    policy: LengthPolicyName = "fixed"

    @property
    def fills_tape(self) -> bool:
        """True if one more draft than is verified can be made during a pass, as `free_speedup` assumes."""
        return self.cost_ratio * (self.max_drafts + 1) < 1 + 1e-9

    @property
    def formula(self) -> float | None:
        """Tokens per unit and sequence as they should be; None where there is no formula."""
        if self.schedule == "off":
            return 1.0
        if self.schedule == "sync":
            return theoretical_speedup(self.max_drafts, self.alpha, self.cost_ratio)
        if self.schedule == "async" and self.fills_tape:
            return free_speedup(self.max_drafts, self.alpha, slowdown=self.slowdown)
        return None


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per unit and sequence, and the standard error; `passes` is the share of passes by schedule.

    `gauges` are the engine's own when the time was over.
    """

    value: float
    error: float
    passes: dict[str, float]
    gauges: EngineGauges

    @property
    def error_percent(self) -> float:
        """The standard error, of the value."""
        return 100 * self.error / self.value


def measure(cell: Cell, num_units: int, seed: int, *, warm_up: int = WARM_UP) -> Rate:
    """Run `num_seqs` endless requests for so long, after a warm-up, all of whose luck `seed` decides."""
    return run_in_virtual_time(_measure(cell, num_units, seed, warm_up))


async def _measure(cell: Cell, num_units: int, seed: int, warm_up: int) -> Rate:
    loop = asyncio.get_running_loop()
    drafter = SetDrafter(cell.alpha, cell.cost_ratio * UNIT_S * (1 - _HAIR), loop.time)
    target = SetTarget(drafter, UNIT_S, cell.slowdown)
    max_tokens = (warm_up + num_units + 2) * (cell.max_drafts + 1)
    parts = make_parts(
        _shape(cell, max_tokens + 2), target, drafters=[] if cell.schedule == "off" else [drafter]
    )
    engine = Engine(lambda: parts, clock=loop.time)
    await engine.start()
    seeds = [cell.num_seqs * seed + number for number in range(cell.num_seqs)]
    streams = [engine.submit(_request(own_seed, max_tokens)) for own_seed in seeds]
    await asyncio.sleep((warm_up + 0.5) * UNIT_S)
    num_passes = Counter(target.num_passes)
    rates: list[float] = []
    for _ in range(NUM_WINDOWS):
        before, started = Counter(target.num_tokens), loop.time()
        await asyncio.sleep(num_units / NUM_WINDOWS * UNIT_S)
        units = (loop.time() - started) / UNIT_S
        rates += [(target.num_tokens[own_seed] - before[own_seed]) / units for own_seed in seeds]
    num_passes, gauges = target.num_passes - num_passes, engine.gauges()
    for stream in streams:
        stream.close()
    await engine.stop()
    num_delivered = engine.metrics.generation_tokens
    assert num_delivered <= target.num_tokens.total() <= num_delivered + cell.num_seqs * (cell.max_drafts + 1)
    shares = {schedule: count / num_passes.total() for schedule, count in num_passes.items()}
    return Rate(fmean(rates), stdev(rates) / sqrt(len(rates)), shares, gauges)


def _shape(cell: Cell, max_model_len: int) -> EngineShape:
    """An engine that is short of nothing."""
    return EngineShape(
        num_blocks=cell.num_seqs * (max_model_len // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_seqs=cell.num_seqs,
        max_num_batched_tokens=cell.num_seqs * (cell.max_drafts + 1),
        max_model_len=max_model_len,
        schedule="sync" if cell.schedule == "off" else cell.schedule,
        length_policy=cell.policy,
        max_draft_tokens=cell.max_drafts,
    )


def _request(seed: int, max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    return GenerationRequest(request_id=str(seed), prompt_token_ids=[1], sampling=sampling)
