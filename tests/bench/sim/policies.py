"""Policies against first come, first served: mean completion, fairness, and latency against load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from engine.errors import Overloaded
from engine.plan.admission import Admission
from engine.plan.request import FinishReason, Request
from engine.plan.scheduling.policy import FairnessWeights
from tests.bench.report import Bar, Section
from tests.bench.sim.cost import GPU_LIKE, StepCost
from tests.bench.sim.run import Run, percentile
from tests.bench.sim.server import Server, Simulation, simulate
from tests.bench.sim.trace import (
    Arrival,
    Trace,
    all_at_once,
    at_rate,
    bimodal_lengths,
    lognormal_lengths,
    make_trace,
    merged,
    poisson,
)

POLICIES = ("fcfs", "orca", "sjf", "priority", "deadline", "fair")
SEATS = 2
TENANTS = ("quiet", "busy")
BUSY_FACTOR = 20


def bimodal_trace(num_requests: int, seed: int) -> list[Arrival]:
    """Many short requests and a few long ones; classes, tenants and deadlines for the policies that look."""
    rng = random.Random(seed)
    lengths = bimodal_lengths((16, 4), (128, 512), 0.05)
    return [
        replace(
            arrival,
            priority=rng.choice((-10, 0, 10)),
            tenant=rng.choice(("a", "b", "c")),
            deadline_s=5.0 + 4 * GPU_LIKE.alone_s(arrival.prompt_tokens, arrival.output_tokens),
        )
        for arrival in make_trace(rng, num_requests, poisson(rng, 1.0), lengths)
    ]


def capacity(trace: Trace, server: Server) -> float:
    """Requests a second that are seated while all seats are always wanted, first come, first served."""
    run = simulate(all_at_once(trace), replace(server, policy="fcfs"))
    last_seated = max(outcome.seated_time or 0.0 for outcome in run.outcomes)
    return (len(trace) - server.max_num_seqs) / last_seated


def run_sjf(
    num_requests: int, seed: int = 4, cost: StepCost = GPU_LIKE, seats: Sequence[int] = (SEATS, 2 * SEATS)
) -> Section:
    """What sjf does to the mean, and to whom it is worst for; the bars are for the first of `seats`."""
    section = Section("sjf", f"sjf against fcfs, bimodal lengths, load 80 %, {cost.name}")
    requests = bimodal_trace(num_requests, seed)
    for max_num_seqs in seats:
        server = Server(cost=cost, max_num_seqs=max_num_seqs)
        trace = at_rate(requests, 0.8 * capacity(requests, server))
        fcfs, sjf = (simulate(trace, replace(server, policy=policy)) for policy in ("fcfs", "sjf"))
        for name, run in (("fcfs", fcfs), ("sjf", sjf)):
            case = f"{name}, seats: {max_num_seqs}"
            section.add(case, "mean completion", "s", [run.mean_latency_s])
            section.add(case, "completion P99", "s", [percentile((o.latency_s for o in run.served), 99)])
            section.add(case, "longest wait", "s", [max(outcome.wait_s for outcome in run.served)])
        if max_num_seqs == seats[0]:
            section.bars += _sjf_bars(fcfs, sjf)
    section.notes.append(
        "a wait is the time to the first seat; one below fcfs's mean counts as that mean, since a seat that "
        f"happened to be free makes any wait infinitely longer; the bars are for {seats[0]} seats: the "
        "more seats, the less there is to gain at this load"
    )
    return section


def _sjf_bars(fcfs: Run, sjf: Run) -> list[Bar]:
    mean_wait = fmean(outcome.wait_s for outcome in fcfs.outcomes)
    pairs = zip(sjf.outcomes, fcfs.outcomes, strict=True)
    worst = max(own.wait_s / max(other.wait_s, mean_wait) for own, other in pairs)
    ratio = fcfs.mean_latency_s / sjf.mean_latency_s
    return [
        Bar("mean completion, fcfs / sjf", 2.0, "x", ratio, at_least=True),
        Bar("longest wait against the same request's with fcfs", 10.0, "x", worst, at_least=False),
    ]


@dataclass(slots=True)
class ServiceWatch:
    """Weighted tokens served to two tenants, while both have requests waiting.

    The gap is the most by which the service of one exceeded that of the other in any interval of such time.
    """

    weights: FairnessWeights = field(default_factory=FairnessWeights)
    gap: float = 0.0
    served: Counter[str] = field(default_factory=Counter)
    _lowest: float = 0.0
    _highest: float = 0.0
    _lead: float = 0.0
    _counted: dict[str, tuple[int, int]] = field(default_factory=dict)
    _backlogged: bool = False

    def __call__(self, simulation: Simulation, _seconds: float) -> None:
        """After a step."""
        gained = self._gained(simulation)
        waiting = {r.tenant for r in simulation.requests.values() if r.first_scheduled_time is None}
        if not waiting.issuperset(TENANTS):
            self._backlogged = False
            return
        if not self._backlogged:
            self._backlogged = True
            self._lead = self._lowest = self._highest = 0.0
            return
        self.served.update(gained)
        self._lead += gained[TENANTS[0]] - gained[TENANTS[1]]
        self._lowest, self._highest = min(self._lowest, self._lead), max(self._highest, self._lead)
        self.gap = max(self.gap, self._highest - self._lowest)

    def _gained(self, simulation: Simulation) -> Counter[str]:
        """Weighted tokens of this step, by tenant. What preemption has computed again counts once."""
        gained: Counter[str] = Counter()
        for request in (*simulation.running, *simulation.ended):
            prompt = min(request.num_computed_tokens, request.num_prompt_tokens)
            old_prompt, old_output = self._counted.get(request.request_id, (0, 0))
            prompt = max(prompt, old_prompt)
            assert request.tenant is not None
            gained[request.tenant] += round(
                self.weights.prompt * (prompt - old_prompt)
                + self.weights.output * (request.num_output_tokens - old_output)
            )
            self._counted[request.request_id] = (prompt, request.num_output_tokens)
        return gained


def run_fairness(num_requests: int, seed: int = 6, cost: StepCost = GPU_LIKE) -> Section:
    """Two tenants with more work than the server can do, one of them sending twenty times as much."""
    section = Section("fair", f"one tenant sends {BUSY_FACTOR}x, {cost.name}")
    server = Server(cost=cost, num_blocks=256, max_num_seqs=32, max_model_len=1024)
    trace = tenants_trace(num_requests, seed)
    watches = {policy: ServiceWatch() for policy in ("fcfs", "fair")}
    for policy, watch in watches.items():
        run = Simulation(trace, replace(server, policy=policy), watch).run()
        section.add(policy, "service gap", "weighted tokens", [watch.gap])
        for tenant in TENANTS:
            section.add(policy, f"served to {tenant}", "weighted tokens", [watch.served[tenant]])
            section.add(policy, f"{tenant}'s mean latency", "s", [_mean_latency(run, tenant)])
    weights = FairnessWeights()
    longest_prompt = max(arrival.prompt_tokens for arrival in trace)
    bound = 2 * max(weights.prompt * longest_prompt, weights.output * server.num_slots)
    section.bars.append(Bar("service gap / VTC bound", 1.0, "x", watches["fair"].gap / bound, at_least=False))
    section.notes.append(
        f"service counts while both have requests waiting; the bound is 2 max(w_p L, w_q M) = {bound:,.0f}, "
        f"L the longest prompt, M the {server.num_slots:,} tokens the KV holds"
    )
    return section


class GatedSimulation(Simulation):
    """The simulation behind the daemon's gate, whose places tenants share."""

    def __init__(self, trace: Trace, server: Server, places: int = 256) -> None:
        super().__init__(trace, server)
        self.turned_away: Counter[str | None] = Counter()  # by tenant: refused, or displaced later
        self._gate = Admission(
            *(places, 10**9, lambda _: 1), reply_of=lambda request: [request], displace=self._displace
        )

    def _takes(self, number: int, request: Request) -> bool:
        try:
            with self._gate.admit(1, self.batcher.queue, request.tenant):
                return True
        except Overloaded:
            self.turned_away[request.tenant] += 1
            return False

    def _displace(self, request: Request, _error: Overloaded) -> None:
        self.turned_away[request.tenant] += 1
        self.batcher.finish(request.request_id, FinishReason.ABORT)
        self._close(request)


def run_flood(
    seconds: float, rates: Sequence[float] = (2.0, 6.0), cost: StepCost = GPU_LIKE, seed: int = 1
) -> Section:
    """What one tenant's flood does to another: its requests that are turned away, and its time to wait."""
    section = Section("flood", f"one tenant sends {BUSY_FACTOR}x, behind the gate, fair, {cost.name}")
    server = Server(cost=cost, policy="fair", max_num_seqs=64, prefix_caching=True)
    ratios, num_turned_away = [], 0
    for rate in rates:
        alone = flood_trace(rate, 0, seconds, seed)
        figures = {}
        for name, trace in (("alone", alone), ("flooded", flood_trace(rate, BUSY_FACTOR, seconds, seed))):
            simulation = GatedSimulation(trace, server)
            run = simulation.run()
            own = [each for each in run.outcomes if each.arrival.tenant == TENANTS[0] and each.token_times]
            figures[name] = median(outcome.ttft_s for outcome in own)
            num_turned_away += simulation.turned_away[TENANTS[0]]
            case = f"{rate:g} a second, {name}"
            section.add(case, "turned away", "requests", [simulation.turned_away[TENANTS[0]]])
            section.add(case, "TTFT p50", "s", [figures[name]])
            section.add(case, "TTFT p99", "s", [percentile((outcome.ttft_s for outcome in own), 99)])
            section.add(case, "all tenants' output", "tokens/s", [_output_rate(run)])
        ratios.append(figures["flooded"] / figures["alone"])
    section.bars += [
        Bar(f"{TENANTS[0]}'s TTFT p50, flooded over alone", 2.0, "x", max(ratios), at_least=False),
        Bar(f"{TENANTS[0]}'s requests turned away", 0, "requests", num_turned_away, at_least=False),
    ]
    return section


def flood_trace(rate: float, factor: int, seconds: float, seed: int) -> list[Arrival]:
    """Both tenants' requests; those of the first do not depend on how many the other sends."""
    traces = []
    for tenant, own_rate in ((TENANTS[0], rate), (TENANTS[1], rate * factor)):
        if own_rate:
            rng = random.Random(f"{tenant} {seed}")
            lengths = lognormal_lengths(128, 48, sigma=0.8, longest=400)
            own = make_trace(rng, round(own_rate * seconds), poisson(rng, own_rate), lengths)
            traces.append([replace(arrival, tenant=tenant) for arrival in own])
    return merged(*traces)


def _output_rate(run: Run) -> float:
    return sum(len(outcome.token_times) for outcome in run.outcomes) / run.end


def tenants_trace(num_requests: int, seed: int) -> list[Arrival]:
    """The quiet tenant alone asks for more than its half of the server, the busy one for 20 times that."""
    rng = random.Random(seed)
    lengths = bimodal_lengths((64, 64), (384, 256), 0.2)
    traces = []
    for tenant, rate, count in (
        (TENANTS[0], 10.0, num_requests // (BUSY_FACTOR + 1)),
        (TENANTS[1], 10.0 * BUSY_FACTOR, num_requests),
    ):
        own = make_trace(rng, count, poisson(rng, rate), lengths)
        traces.append([replace(arrival, tenant=tenant) for arrival in own])
    return merged(*traces)


def _mean_latency(run: Run, tenant: str) -> float:
    return fmean(outcome.latency_s for outcome in run.served if outcome.arrival.tenant == tenant)


LOADS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
QUANTITIES = ("mean completion", "completion P99", "mean TTFT")


def run_sweep(num_requests: int, seed: int = 8, cost: StepCost = GPU_LIKE) -> Section:
    """Every policy at every load, on the same requests."""
    section = Section("sweep", f"latency against load, bimodal lengths, {SEATS} seats, {cost.name}")
    server = Server(cost=cost, max_num_seqs=SEATS, aging_s=1.0)
    trace = bimodal_trace(num_requests, seed)
    highest = capacity(trace, server)
    for policy in POLICIES:
        for load in LOADS:
            run = simulate(at_rate(trace, load * highest), replace(server, policy=policy))
            latencies = [outcome.latency_s for outcome in run.served]
            figures = (fmean(latencies), percentile(latencies, 99), run.mean_ttft_s)
            for quantity, value in zip(QUANTITIES, figures, strict=True):
                section.add(f"{policy}, load {load:.0%}", quantity, "s", [value])
    return section
