"""Every experiment of the simulator, small: the bars hold, and a seed decides a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bench.report import Section
from tests.bench.sim.batching import run_chunks, run_memory, run_static
from tests.bench.sim.long_queue import run_queue
from tests.bench.sim.policies import bimodal_trace, run_fairness
from tests.bench.sim.promises import run_deadlines, run_prefixes
from tests.bench.sim.server import Server, simulate
from tests.bench.sim.trace import at_rate


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(lambda: run_static(1000, factors=(25.0,)), id="static"),
        pytest.param(lambda: run_memory(300), id="memory"),
        pytest.param(lambda: run_chunks(500), id="chunks"),
        pytest.param(lambda: run_deadlines(300), id="deadlines"),
        pytest.param(lambda: run_fairness(400), id="fair"),
        pytest.param(run_prefixes, id="prefixes"),
        pytest.param(lambda: run_queue(100), id="queue"),
    ],
)
def test_every_bar_is_met(experiment: Callable[[], Section]) -> None:
    section = experiment()
    assert section.bars
    for bar in section.bars:
        assert bar.met, f"{bar.name}: {bar.measured} against {bar.limit}"


def test_a_seed_decides_a_run() -> None:
    traces = [bimodal_trace(60, seed=3) for _ in range(2)]
    runs = [simulate(at_rate(trace, 2.0), Server(max_num_seqs=4, policy="sjf")) for trace in traces]
    assert runs[0] == runs[1]
