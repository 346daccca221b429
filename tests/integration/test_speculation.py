"""Speculation changes no token: whole engines over tiny models, off against everything that can draft.

test_speculation_slow has the same with a thousand requests a cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.loop.run_ahead import RunAhead
from tests.support.examples import share_of
from tests.support.repetitive_world import Family, World, make_families, make_world
from tests.support.speculated import Run, differences, is_cut, single_threaded
from tests.support.speculation_matrix import (
    ALWAYS,
    NEVER_IN_TIME,
    SETTINGS,
    SOURCES,
    Tally,
    speak_drafted,
    speak_plainly,
)
from tests.support.tiny_models import save_tiny_model

MODEL_FREE = ("ngram", "suffix")  # they draft where a text repeats itself, which takes many texts
# Alone and in a crowd, in chunks, preempted either way, by turns and in threads: not all of it with everyone.
SETTINGS_OF = {"sync": ("crowd", "chunks", "swap"), "async": ("alone", "recompute", "swap, threads")}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def world(small: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def families(world: World) -> list[Family]:
    return make_families(world, share_of(64, 2))


@pytest.fixture(scope="module")
def fewer(families: list[Family]) -> list[Family]:
    """Enough for drafters that always have something to say."""
    return families[: share_of(48)]


@pytest.fixture(scope="module")
def expected(world: World, families: list[Family]) -> Run:
    return asyncio.run(speak_plainly(world.target, families))


# A draft model, too, drafts by default, both ways: in the tests below.
@pytest.mark.by_default("n-gram-async", "suffix-sync", "Medusa-sync", "EAGLE-async")
@pytest.mark.parametrize("schedule", SETTINGS_OF)
@pytest.mark.parametrize("source", SOURCES)
async def test_text_is_the_same_whoever_drafts(
    source: str,
    schedule: str,
    world: World,
    families: list[Family],
    fewer: list[Family],
    expected: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether a micro-step pays hangs on the machine's speed: here each one is begun.
    monkeypatch.setattr(RunAhead, "_would_keep_from_more", lambda self, seconds: False)
    asking = families if SOURCES[source].method in MODEL_FREE else fewer
    flags = [*SOURCES[source].flags_in(world), "--speculation-schedule", schedule, *ALWAYS]
    tally = Tally()
    for name in SETTINGS_OF[schedule]:
        some = asking[::3] if name == "alone" else asking
        found = await speak_drafted(world.target, flags, SETTINGS[name], some, expected)
        tally.add(SOURCES[source].method, expected, found)
    print("\n".join(tally.lines()))
    assert not tally.differences
    assert tally.total("preempted") > 0 < tally.total("cancelled")
    assert tally.total("cached") > 0
    if schedule == "sync":
        tally.assert_drafted(source, in_each=10)
    elif (source, schedule) not in NEVER_IN_TIME:
        tally.assert_drafted(source, in_all=10)


@pytest.mark.by_default("heads-crowd", "draft model and heads-swap, threads")
@pytest.mark.parametrize("setting", ["crowd", "swap, threads"])
@pytest.mark.parametrize(
    "more",
    [("--draft-heads", "eagle_heads"), ("--draft-model", "near", "--medusa-heads", "medusa_heads")],
    ids=["heads", "draft model and heads"],
)
async def test_text_is_the_same_by_default(
    more: tuple[str, ...], setting: str, world: World, fewer: list[Family], expected: Run
) -> None:
    """Whoever is at hand drafts as long as it pays."""
    flags = [str(getattr(world, flag, flag)) for flag in more]
    found = await speak_drafted(world.target, flags, SETTINGS[setting], fewer, expected)
    assert differences(expected, found) == []
    assert found.stats.num_accepted > 0


@pytest.mark.by_default("recompute")
@pytest.mark.parametrize("setting", ["crowd", "recompute"])
async def test_text_is_the_same_whichever_outcomes_are_drafted_for(
    setting: str, world: World, fewer: list[Family], expected: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunAhead, "_would_keep_from_more", lambda self, seconds: False)
    flags = [*SOURCES["draft model"].flags_in(world), "--speculation-schedule", "async", *ALWAYS]
    found = await speak_drafted(
        world.target, [*flags, "--draft-lanes", "3"], SETTINGS[setting], fewer, expected
    )
    assert differences(expected, found) == []
    assert found.stats.run_ahead["lane"] > 0


@pytest.mark.by_default("rejection-crowd", "block-recompute")
@pytest.mark.parametrize("setting", ["crowd", "recompute"])
@pytest.mark.parametrize("verification", ["rejection", "block"])
async def test_greedy_text_is_the_same_by_any_verification(
    verification: str, setting: str, world: World, fewer: list[Family], expected: Run
) -> None:
    """Beside others who draw, and whose text may be another."""
    flags = [*SOURCES["draft model"].flags_in(world), "--draft-verification", verification, *ALWAYS]
    flags += ["--speculation-schedule", "sync"]
    found = await speak_drafted(world.target, flags, SETTINGS[setting], fewer, expected)
    found.spoken = {each: found.spoken[each] for each, kind in found.kinds.items() if kind == "greedy"}
    assert differences(expected, found) == []
    assert min(found.stats.num_accepted, found.stats.num_proposed - found.stats.num_accepted) > 50


@pytest.mark.by_default("granite_hybrid-async-recompute", "qwen3_5_hybrid-sync-chunks")
@pytest.mark.parametrize(("schedule", "setting"), [("sync", "chunks"), ("async", "recompute")])
@pytest.mark.parametrize("family", ["granite_hybrid", "qwen3_5_hybrid"])
async def test_text_is_the_same_where_only_drafts_can_be_taken_back(
    family: str, schedule: str, setting: str, world: World, fewer: list[Family], tmp_path: Path
) -> None:
    """State is cut back to each draft that was accepted, in pieces of prompts and after preemption."""
    target = save_tiny_model(family, tmp_path / family)
    some = fewer[::2]
    expected = await speak_plainly(target, some)
    flags = ["--draft-model", str(world.near), "--speculation-schedule", schedule, *ALWAYS]
    found = await speak_drafted(target, flags, SETTINGS[setting], some, expected)
    assert differences(expected, found) == []
    assert any(map(is_cut, found.spoken.values()))
    assert found.stats.num_fallbacks == 0
    assert schedule == "async" or found.stats.num_proposed > 50  # drafts may be late for such a small target
