"""The whole loop, simulated from seeds: every request gets its serial text, or ends for a reason it has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.examples import share_of
from tests.support.simulation import simulate

MOST_SEEDS = 400
NUM_SEEDS = share_of(MOST_SEEDS, 8)
NUM_SLOW_SEEDS = 20_000

# What a simulation that has gone lame would no longer do, and how often most seeds do it at least.
EVENTS = {
    "length": 1000,
    "stop": 200,
    "abort": 100,
    "deadline": 100,
    "refused": 5,
    "left": 100,
    "changed: cancel": 100,
    "changed: priority": 100,
    "changed: deadline": 100,
    "changed: drafts": 100,
    "preempted by recompute": 50,
    "preempted by swap": 50,
    "blocks swapped in": 50,
    "blocks forgotten": 50,
    "cached": 1000,
    "drafts accepted": 500,
    "drafts rejected": 500,
    "ahead: hit": 500,
    "ahead: miss": 500,
    "drafts dropped: stale": 500,
    "drafts dropped: late": 20,
    "drafts dropped: cancelled": 500,
    "steps ahead": 1000,
    "drawn later": 100,
}

pytestmark = pytest.mark.parametrize("faulty", [False, True], ids=["healthy", "faulty"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Injected faults are logged with their tracebacks, which costs more than the runs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_request_gets_its_serial_text_or_ends_for_a_reason(faulty: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        seen += simulate(seed, faulty=faulty).seen
    for event, least in EVENTS.items():
        assert seen[event] * MOST_SEEDS >= least * NUM_SEEDS, f"{event} hardly ever happens: {seen}"
    for event in ("error", "drafters failed", "drafts dropped: error"):
        assert (seen[event] > 0) is faulty, f"{event}: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_seeds(faulty: bool) -> None:
    for seed in range(MOST_SEEDS, NUM_SLOW_SEEDS):
        simulate(seed, faulty=faulty)


def test_the_same_seed_gives_the_same_trace(faulty: bool) -> None:
    count = share_of(6, 2)
    traces = [[repr(simulate(seed, faulty=faulty).trace) for seed in range(count)] for _ in range(2)]
    assert traces[0] == traces[1]
    assert len(set(traces[0])) == count, "another seed is another run"


def test_a_failure_says_how_to_replay_it(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.support.simulation.expected_output", lambda prompt, number, seed: [-1] * number
    )
    with pytest.raises(BaseException) as caught:
        simulate(0, faulty=faulty)
    command = "python -m tests.support.simulation 0" + (" --faulty" if faulty else "")
    assert any(command in note for note in caught.value.__notes__)
