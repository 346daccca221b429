"""Every experiment of the simulator, small: the bars hold, and a seed decides a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.bench.report import Section
from tests.bench.sim.baselines import reserving, run_prefill_first, run_static_batches
from tests.bench.sim.batching import run_chunks, run_memory, run_static
from tests.bench.sim.cost import StepCost
from tests.bench.sim.long_queue import run_queue
from tests.bench.sim.plots import plot_sweep
from tests.bench.sim.policies import (
    LOADS,
    POLICIES,
    QUANTITIES,
    bimodal_trace,
    run_fairness,
    run_flood,
    run_sjf,
)
from tests.bench.sim.promises import run_deadlines, run_prefixes, run_unknown_lengths
from tests.bench.sim.server import Server, simulate
from tests.bench.sim.trace import Arrival, at_rate, bursts


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(lambda: run_static(1000, factors=(25.0,)), id="static"),
        pytest.param(lambda: run_memory(200), id="memory"),
        pytest.param(lambda: run_chunks(500, loads=(0.8,)), id="chunks"),
        pytest.param(lambda: run_sjf(400, seats=(1,)), id="sjf"),
        pytest.param(lambda: run_deadlines(100, loads=(0.8, 1.2)), id="deadlines"),
        pytest.param(lambda: run_fairness(250), id="fair"),
        pytest.param(lambda: run_flood(10, rates=(4.0,)), id="flood"),
        pytest.param(run_prefixes, id="prefixes"),
        pytest.param(lambda: run_queue(100), id="queue"),
    ],
)
def test_every_bar_is_met(experiment: Callable[[], Section]) -> None:
    section = experiment()
    assert section.bars
    for bar in section.bars:
        assert bar.met, f"{bar.name}: {bar.measured} against {bar.limit}"


def test_unknown_lengths_are_compared_with_an_oracle_that_knows_them() -> None:
    section = run_unknown_lengths(40, asked=1)
    figures = {(each.case, each.quantity): each.median or 0.0 for each in section.measurements}
    for load in ("80%", "100%", "150%"):
        wasted = {name: figures[f"load {load}, {name}", "wasted"] for name in ("fcfs", "deadline", "oracle")}
        assert wasted["oracle"] <= wasted["deadline"] <= wasted["fcfs"] + 5
    assert len(section.bars) >= 2


def test_a_seed_decides_a_run() -> None:
    traces = [bimodal_trace(60, seed=3) for _ in range(2)]
    runs = [simulate(at_rate(trace, 2.0), Server(max_num_seqs=4, policy="sjf")) for trace in traces]
    assert runs[0] == runs[1]


def test_the_same_request_may_share_a_prefix_and_nothing_else() -> None:
    sharer = Arrival(0.0, 8, 1, prefix=1, shared_tokens=5)
    first, second = sharer.token_ids(0), sharer.token_ids(1)
    assert first[:5] == second[:5]
    assert len(set(first) | set(second)) == 5 + 3 + 3
    assert not set(first) & set(Arrival(0.0, 8, 1, prefix=2, shared_tokens=5).token_ids(2))


def test_static_batches_wait_to_be_full_and_end_together() -> None:
    cost = StepCost("round", 1.0, 0.0, 0.0)
    run = run_static_batches([Arrival(0.0, 1, 1), Arrival(5.0, 1, 3), Arrival(6.0, 1, 1)], cost, 2)
    assert [outcome.finish_time for outcome in run.outcomes] == [8.0, 8.0, 9.0]


def test_prefill_first_stops_decodes_for_a_prompt() -> None:
    cost = StepCost("round", 1.0, 1.0, 0.0)
    run = run_prefill_first([Arrival(0.0, 1, 3), Arrival(2.5, 4, 1)], cost, 8, 100)
    assert [outcome.token_times for outcome in run.outcomes] == [[2.0, 3.0, 9.0], [8.0]]


def test_a_reservation_takes_a_seat_for_each_longest_sequence() -> None:
    assert reserving(Server(num_blocks=100, block_size=16, max_model_len=160)).max_num_seqs == 10


def test_bursts_come_together_at_the_mean_rate() -> None:
    times = list(islice(bursts(random.Random(1), 10.0, 5), 5000))
    assert len(set(times)) == 1000
    assert times[-1] == pytest.approx(500, rel=0.1)


def test_the_plots_are_written(tmp_path: Path) -> None:
    sweep = Section("sweep", "latency against load")
    for policy in POLICIES:
        for load in LOADS:
            for quantity in QUANTITIES:
                sweep.add(f"{policy}, load {load:.0%}", quantity, "s", [1.0 + load])
    for path in plot_sweep(sweep, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")
