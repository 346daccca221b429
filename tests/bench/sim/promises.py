"""What is promised to single requests: deadlines met, and shared prefixes not computed again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.bench.report import Bar, Section
from tests.bench.sim.cost import GPU_LIKE, StepCost
from tests.bench.sim.policies import capacity
from tests.bench.sim.run import Run
from tests.bench.sim.server import Server, Simulation, simulate
from tests.bench.sim.trace import Arrival, Trace, at_rate, lognormal_lengths, make_trace, poisson

DEADLINE_LOADS = (0.8, 0.9, 1.0, 1.1, 1.2)
UNKNOWN_LOADS = (0.8, 1.0, 1.5)
PREFIX_TOKENS, OWN_TOKENS, NUM_SHARERS = 512, 17, 16


def deadline_trace(num_requests: int, seed: int, cost: StepCost) -> list[Arrival]:
    """Lognormal lengths, each deadline a draw from tight to loose times what the request needs alone."""
    rng = random.Random(seed)
    lengths = lognormal_lengths(128, 64, sigma=1.0, longest=1000)
    return [
        replace(arrival, deadline_s=rng.uniform(1.5, 8.0) * cost.alone_s(*_lengths(arrival)))
        for arrival in make_trace(rng, num_requests, poisson(rng, 1.0), lengths)
    ]


def _lengths(arrival: Arrival) -> tuple[int, int]:
    return arrival.prompt_tokens, arrival.output_tokens


def run_deadlines(
    num_requests: int, seed: int = 5, cost: StepCost = GPU_LIKE, loads: Sequence[float] = DEADLINE_LOADS
) -> Section:
    """Deadlines met around and above capacity."""
    section = Section("deadlines", f"earliest deadline first with refusal against fcfs, {cost.name}")
    fcfs = Server(cost=cost, max_num_seqs=8)
    edf = replace(fcfs, policy="deadline", keeps_deadlines=True)
    servers = {"fcfs": fcfs, "fcfs, refusing too": replace(fcfs, keeps_deadlines=True), "deadline": edf}
    trace = deadline_trace(num_requests, seed, cost)
    highest = capacity(trace, fcfs)
    leads = []
    for load in loads:
        runs = {name: simulate(at_rate(trace, load * highest), server) for name, server in servers.items()}
        for name, run in runs.items():
            _add(section, f"load {load:.0%}, {name}", run)
        leads.append(100 * (runs["deadline"].share_in_time - runs["fcfs"].share_in_time))
    least = min(leads)
    section.bars.append(
        Bar("deadlines met, ahead of fcfs by at the least", 0.1, "points", least, at_least=True)
    )
    section.notes.append("shares are of all requests sent, those refused included")
    return section


def run_unknown_lengths(
    num_requests: int, seed: int = 5, cost: StepCost = GPU_LIKE, asked: int = 10
) -> Section:
    """Deadlines that do not depend on a reply's length, which nobody knows; an oracle that does is beside.

    Some replies are longer than their deadline allows on an idle server. What they get is wasted by whoever
    cannot tell them from others: `least waste` is what that comes to without any load.
    """
    section = Section("lengths", f"deadlines by the median length, lengths unknown, {cost.name}")
    trace = blind_deadline_trace(num_requests, seed, cost)
    known = Server(cost=cost, max_num_seqs=8)
    unknown = replace(known, hides_lengths=True)
    servers = {
        "fcfs": unknown,
        "deadline": replace(unknown, policy="deadline", keeps_deadlines=True),
        "oracle": replace(known, policy="deadline", keeps_deadlines=True),
    }
    highest = capacity(trace, known)
    leads, wastes, num_refused, num_wrong = [], [], 0, 0
    for load in UNKNOWN_LOADS:
        sent = at_rate(trace, load * highest)
        runs = {name: simulate(sent, server) for name, server in servers.items()}
        for name, run in runs.items():
            _add(section, f"load {load:.0%}, {name}", run)
            section.add(f"load {load:.0%}, {name}", "wasted", "% of tokens", [100 * run.wasted_share])
        leads.append(100 * (runs["deadline"].share_in_time - runs["fcfs"].share_in_time))
        wastes.append(100 * runs["deadline"].wasted_share)
        refused = [number for number, each in enumerate(runs["deadline"].outcomes) if each.refused]
        for number in random.Random(seed).sample(refused, min(asked, len(refused))):
            taken = simulate(sent, replace(servers["deadline"], exempt=frozenset([number])))
            num_refused, num_wrong = num_refused + 1, num_wrong + taken.outcomes[number].met_deadline
    section.add("each alone", "wasted", "% of tokens", [100 * _least_waste(trace, cost)])
    section.bars += [
        Bar("deadlines met, ahead of fcfs by at the least", 10, "points", min(leads), at_least=True),
        Bar("tokens spent on requests that miss, at the most", 3, "%", max(wastes), at_least=False),
    ]
    if num_refused:
        wrong = 100 * num_wrong / num_refused
        section.bars.append(
            Bar(f"refused and would have met it, of {num_refused}", 5, "%", wrong, at_least=False)
        )
    return section


def blind_deadline_trace(num_requests: int, seed: int, cost: StepCost) -> list[Arrival]:
    """`deadline_trace`, with deadlines in multiples of what a reply of median length needs alone."""
    rng = random.Random(seed + 1)
    return [
        replace(each, deadline_s=rng.uniform(1.5, 8.0) * cost.alone_s(each.prompt_tokens, 64))
        for each in deadline_trace(num_requests, seed, cost)
    ]


def _least_waste(trace: Trace, cost: StepCost) -> float:
    """The share of all tokens that requests get which miss their deadlines, were each alone."""
    wasted = useful = 0.0
    for arrival in trace:
        assert arrival.deadline_s is not None
        if cost.alone_s(*_lengths(arrival)) <= arrival.deadline_s:
            useful += arrival.output_tokens
        else:
            wasted += (arrival.deadline_s - cost.step_s(arrival.prompt_tokens, 0)) / cost.step_s(0, 1)
    return wasted / (wasted + useful)


def _add(section: Section, case: str, run: Run) -> None:
    count = len(run.outcomes)
    section.add(case, "in time", "%", [100 * run.share_in_time])
    section.add(case, "refused", "%", [100 * sum(outcome.refused for outcome in run.outcomes) / count])
    section.add(case, "expired", "%", [100 * sum(outcome.expired for outcome in run.outcomes) / count])


def run_prefixes(cost: StepCost = GPU_LIKE) -> Section:
    """A burst that shares a prefix, then a second one: what comes from the cache, and what that saves."""
    section = Section("prefixes", f"{NUM_SHARERS} at once, {PREFIX_TOKENS} tokens shared, {cost.name}")
    length = PREFIX_TOKENS + OWN_TOKENS
    burst = [Arrival(0.0, length, 32, prefix=1, shared_tokens=PREFIX_TOKENS)] * NUM_SHARERS
    trace = [*burst, *(replace(arrival, time=60.0) for arrival in burst)]
    run = Simulation(trace, Server(cost=cost, prefix_caching=True)).run()
    bursts = {"cold": run.outcomes[:NUM_SHARERS], "warm": run.outcomes[NUM_SHARERS:]}
    shares = {}
    for name, outcomes in bursts.items():
        cached = sum(outcome.num_cached_tokens for outcome in outcomes)
        shares[name] = 100 * cached / (PREFIX_TOKENS * NUM_SHARERS)
        section.add(name, "prefix from cache", "%", [shares[name]])
        section.add(name, "mean TTFT", "s", [sum(o.ttft_s for o in outcomes) / NUM_SHARERS])
    section.bars.append(
        Bar("warm prefix tokens that come from the cache", 95.0, "%", shares["warm"], at_least=True)
    )
    return section
