"""Iteration-level against static batches, paged against reserved memory, chunked against prefill-first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan.request import Request
from tests.bench.report import Bar, Section
from tests.bench.sim.baselines import reserving, run_prefill_first, run_static_batches
from tests.bench.sim.cost import GPU_LIKE, StepCost
from tests.bench.sim.run import Run, percentile
from tests.bench.sim.server import Server, Simulation, simulate
from tests.bench.sim.trace import (
    Trace,
    all_at_once,
    at_rate,
    lognormal,
    lognormal_lengths,
    make_trace,
    poisson,
)

STATIC_BATCH = 32
STATIC_LOADS = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the rate at which static batches saturate
RATE_FACTORS = (10.0, 14.0, 20.0, 25.0, 30.0)
CHUNK_LOADS = (0.6, 0.8, 0.9)
CHUNK_BAR_LOAD = 0.8


def run_static(
    num_requests: int,
    seed: int = 1,
    cost: StepCost = GPU_LIKE,
    factors: Sequence[float] = RATE_FACTORS,
) -> Section:
    """How much more comes through than with static batches, at a mean latency those can reach at all."""
    section = Section("static", f"iteration-level against static batches of {STATIC_BATCH}, {cost.name}")
    rng = random.Random(seed)
    lengths = lognormal_lengths(96, 96, sigma=1.2, longest=1024)
    trace = make_trace(rng, num_requests, poisson(rng, 1.0), lengths)
    server = Server(cost=cost)  # its memory is what 32 sequences of max_model_len need: as much as static has
    assert server.num_slots == STATIC_BATCH * server.max_model_len
    saturated = run_static_batches(all_at_once(trace), cost, STATIC_BATCH).rate
    statics = [
        run_static_batches(at_rate(trace, load * saturated), cost, STATIC_BATCH) for load in STATIC_LOADS
    ]
    for load, run in zip(STATIC_LOADS, statics, strict=True):
        _add_run(section, f"static, {load:.0%} of what saturates it", run)
    best = min(statics, key=lambda run: run.mean_latency_s)
    ratio = 0.0
    for factor in factors:
        run = simulate(at_rate(trace, factor * best.rate), server)
        _add_run(section, f"iteration-level, {factor:.0f} times the best static's", run)
        if run.mean_latency_s > best.mean_latency_s:
            break
        ratio = max(ratio, run.rate / best.rate)
    section.bars.append(Bar("request rate, iteration-level / static", 10.0, "x", ratio, at_least=True))
    section.notes.append(
        "equal mean latency: the lowest that static batches reach at any load; rates are those served, so an "
        "overload cannot raise them; same KV memory for both"
    )
    return section


def _add_run(section: Section, case: str, run: Run) -> None:
    section.add(case, "served", "requests/s", [run.rate])
    section.add(case, "mean latency", "s", [run.mean_latency_s])


@dataclass(slots=True)
class MemoryWatch:
    """What the KV memory held, step by step, weighted by the time of the steps that found requests waiting.

    Only those say what fits: with nobody waiting, memory is free because nobody wants it.
    """

    seconds: float = 0.0
    running: float = 0.0
    live_slots: float = 0.0
    held_slots: float = 0.0

    def __call__(self, simulation: Simulation, seconds: float) -> None:
        """After a step: a slot is live when it holds the KV of a computed token."""
        if len(simulation.batcher.queue) == 0:
            return
        kv = simulation.batcher.kv
        running: list[Request] = simulation.running
        self.seconds += seconds
        self.running += seconds * len(running)
        self.live_slots += seconds * sum(request.num_computed_tokens for request in running)
        self.held_slots += seconds * kv.num_used_blocks * kv.block_size

    @property
    def concurrency(self) -> float:
        """Requests that held memory, in the mean."""
        return self.running / self.seconds

    @property
    def waste(self) -> float:
        """Share of the slots held that no token used."""
        return 1.0 - self.live_slots / self.held_slots


def run_memory(num_requests: int, seed: int = 2, cost: StepCost = GPU_LIKE) -> Section:
    """How many requests run at once in the same memory, and how much of what they hold they use."""
    section = Section("memory", f"paged against max-length reservation, same memory, {cost.name}")
    rng = random.Random(seed)
    lengths = lognormal_lengths(256, 256, sigma=0.8, longest=1024)
    trace = all_at_once(make_trace(rng, num_requests, poisson(rng, 1.0), lengths))
    paged = Server(cost=cost)
    watches: dict[str, MemoryWatch] = {}
    for case, server in (("paged", paged), ("reserved", reserving(paged))):
        watch = watches[case] = MemoryWatch()
        run = Simulation(trace, server, watch).run()
        section.add(case, "running at once", "requests", [watch.concurrency])
        section.add(case, "served", "requests/s", [run.rate])
        section.add(case, "preempted", "times", [sum(outcome.num_preemptions for outcome in run.outcomes)])
    reserved_slots = watches["reserved"].concurrency * paged.max_model_len
    live = watches["reserved"].live_slots / watches["reserved"].seconds
    section.add("paged", "memory wasted", "%", [100 * watches["paged"].waste])
    section.add("reserved", "memory wasted", "%", [100 * (1 - live / reserved_slots)])
    ratio = watches["paged"].concurrency / watches["reserved"].concurrency
    section.bars += [
        Bar("concurrent requests, paged / reserved", 2.0, "x", ratio, at_least=True),
        Bar("live-token waste, blocks of 16", 4.0, "%", 100 * watches["paged"].waste, at_least=False),
    ]
    return section


def run_chunks(
    num_requests: int, seed: int = 3, cost: StepCost = GPU_LIKE, loads: Sequence[float] = CHUNK_LOADS
) -> Section:
    """What long prompts do to the streams of others, and what sparing those costs the prompts."""
    section = Section("chunks", f"chunked prefill against prefill-first, {cost.name}")
    rng = random.Random(seed)
    trace = make_trace(rng, num_requests, poisson(rng, 1.0), _long_prompts)
    server = Server(cost=cost, num_blocks=40_000, max_num_seqs=64, max_model_len=10_000)
    capacity = _prefill_first(all_at_once(trace), server).rate
    for load in loads:
        at_load = at_rate(trace, load * capacity)
        first, chunked = _prefill_first(at_load, server), simulate(at_load, server)
        for name, run in (("prefill-first", first), ("chunked", chunked)):
            case = f"{name}, load {load:.0%}"
            section.add(case, "inter-token P99", "s", [percentile(run.gaps_s, 99)])
            section.add(case, "mean TTFT", "s", [run.mean_ttft_s])
            section.add(case, "TTFT P99", "s", [percentile((o.ttft_s for o in run.served), 99)])
            section.add(case, "served", "requests/s", [run.rate])
        if load == CHUNK_BAR_LOAD:
            better = percentile(first.gaps_s, 99) / percentile(chunked.gaps_s, 99)
            worse = 100 * (chunked.mean_ttft_s / first.mean_ttft_s - 1)
            section.bars += [
                Bar("inter-token P99, prefill-first / chunked", 2.0, "x", better, at_least=True),
                Bar("mean TTFT, chunked longer by", 10.0, "%", worse, at_least=False),
            ]
    section.notes.append(
        f"chunks of at most {server.max_num_batched_tokens} tokens a step; memory is without limit for both; "
        f"load is of what prefill-first serves at most; the bars are taken at {CHUNK_BAR_LOAD:.0%}"
    )
    return section


def _prefill_first(trace: Trace, server: Server) -> Run:
    return run_prefill_first(trace, server.cost, server.max_num_seqs, 8192)


def _long_prompts(rng: random.Random) -> tuple[int, int]:
    return lognormal(rng, 1024, 0.8, 8000), lognormal(rng, 128, 0.8, 1000)
