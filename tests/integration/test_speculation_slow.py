"""A thousand seeded requests for everyone who drafts, by either schedule: no token may differ."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.support.repetitive_world import KINDS, Family, World, make_families, make_world
from tests.support.speculated import Run, single_threaded
from tests.support.speculation_matrix import (
    ALWAYS,
    NEVER_IN_TIME,
    SETTINGS,
    SOURCES,
    Tally,
    speak_drafted,
    speak_plainly,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_PORTIONS = 2 * len(SETTINGS)
PORTION = 76  # requests that share an engine's life


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def world(small: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def portions(world: World) -> list[list[Family]]:
    return [make_families(world, PORTION, seed) for seed in range(NUM_PORTIONS)]


@pytest.fixture(scope="module")
def expected(world: World, portions: list[list[Family]]) -> list[Run]:
    async def speak() -> list[Run]:
        return [await speak_plainly(world.target, families) for families in portions]

    return asyncio.run(speak())


@pytest.mark.parametrize("schedule", ("sync", "async"))
@pytest.mark.parametrize("source", SOURCES)
async def test_no_token_of_thousands_of_requests_differs(
    source: str, schedule: str, world: World, portions: list[list[Family]], expected: list[Run]
) -> None:
    flags = [*SOURCES[source].flags_in(world), "--speculation-schedule", schedule, *ALWAYS]
    tally = Tally()
    for families, said, name in zip(portions, expected, cycle(SETTINGS), strict=False):
        found = await speak_drafted(world.target, flags, SETTINGS[name], families, said)
        tally.add(SOURCES[source].method, said, found)
    print("\n".join([f"{source}, {schedule}", *tally.lines()]))
    assert not tally.differences
    assert tally.total("requests") >= 1000
    for kind in KINDS:
        assert tally.counts[kind, "requests"] >= 300
        assert tally.counts[kind, "cancelled"] >= 30
        assert tally.counts[kind, "preempted"] >= 10
        assert tally.counts[kind, "cached"] >= 100
    if (source, schedule) not in NEVER_IN_TIME:
        tally.assert_drafted(source, in_each=100 if schedule == "sync" else 10)
