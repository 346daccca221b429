"""Fault plans over engines launched ahead: who is hit ends once, and all others have their own text."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.examples import share_of
from tests.support.fault_fuzz import World, play
from tests.support.speculated import single_threaded

NUM_SEEDS = share_of(24, 8)
NUM_SLOW_SEEDS = 50


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Without what planned faults log, which costs more than the runs."""
    logging.disable(logging.CRITICAL)
    with single_threaded():
        yield World(tmp_path_factory.mktemp("faults"))
    logging.disable(logging.NOTSET)


def play_all(world: World, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += asyncio.run(play(world, seed))
    return seen


def test_whatever_goes_wrong_by_plan_a_text_is_right_or_an_error(world: World) -> None:
    seen = play_all(world, range(NUM_SEEDS))
    assert seen["launched ahead"] > 20 and seen["drawn later"] > 5 and seen["unread drafts"] > 5
    assert seen["error"] > 0 and seen["length"] > 5


@pytest.mark.slow
def test_the_same_of_many_plans(world: World) -> None:
    seen = play_all(world, range(1000, 1000 + NUM_SLOW_SEEDS))
    assert seen["passes failed"] > 45 and seen["preempted"] > 10 and seen["abort"] > 35
