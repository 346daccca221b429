"""MTP modules through whole engines: the text is the same with them as without, and their drafts are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from config import load_settings
from engine.startup.build import load_parts
from engine.startup.doctor import diagnose
from tests.support.native import WITHOUT_KERNELS, compiled_home
from tests.support.played_back import play_back_rounds
from tests.support.repetitive_world import Family, World, make_families
from tests.support.speculated import Run, differences, engine_of, run, single_threaded
from tests.support.speculation_matrix import ALWAYS, SETTINGS, speak_drafted, speak_plainly
from tests.support.tiny_mtp import FAMILIES, TinyMtp

PHRASES = [[3 + (start * 5 + step) % 16 for step in range(14)] for start in range(20)]


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyMtp(request.param, copies_last_token=True)
    return tiny.save(tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def families(target: Path) -> list[Family]:
    return make_families(World(target, target, target, target, PHRASES), 20)


@pytest.fixture(scope="module")
def expected(small: None, target: Path, families: list[Family]) -> Run:
    return asyncio.run(speak_plainly(target, families))


@pytest.mark.by_default(
    *("glm4_moe-recompute", "deepseek_v3-recompute", "glm4_moe_lite-chunks", "mimo-crowd"),
    *("qwen3_5-recompute", "qwen3_5_moe-crowd", "qwen3_next-chunks"),
)
@pytest.mark.parametrize("setting", ["crowd", "chunks", "recompute"])
async def test_text_is_the_same_with_the_module(
    setting: str, target: Path, families: list[Family], expected: Run
) -> None:
    """In a crowd, in pieces of prompts and preempted."""
    flags = ["--speculative-method", "mtp", "--speculation-schedule", "sync", *ALWAYS]
    found = await speak_drafted(target, flags, SETTINGS[setting], families, expected)
    assert differences(expected, found) == []
    accepted, rejected = found.stats.num_accepted, found.stats.num_proposed - found.stats.num_accepted
    assert min(accepted, rejected) > 10, (accepted, rejected)  # of each in each of the three


@pytest.mark.by_default("glm4_moe", "deepseek_v3")
async def test_text_is_the_same_with_recorded_rounds(
    target: Path, families: list[Family], expected: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; the drafter reads a window of a prompt at a time, and what a step has accepted."""
    recorder = play_back_rounds(monkeypatch)
    flags = ["--speculative-method", "mtp", "--speculation-schedule", "sync", *ALWAYS]
    found = await speak_drafted(target, flags, SETTINGS["crowd"], families, expected)
    assert differences(expected, found) == []
    assert found.stats.num_accepted > 10 and recorder.num_replayed > 5 * recorder.num_recorded > 0


@pytest.mark.by_default("deepseek_v3", "mimo", "qwen3_next")
async def test_it_drafts_by_default_and_says_so(target: Path) -> None:
    settings = load_settings([str(target), "--kv-cache-memory", "4MiB"], environ=WITHOUT_KERNELS)
    found = diagnose(settings)
    assert found.problems == [] and found.drafts is not None
    assert found.drafts.methods == load_parts(settings).info.draft_methods
    assert found.drafts.methods[-1] == "mtp"
    async with engine_of(target) as engine:
        assert "mtp" in engine.info.draft_methods


async def test_it_drafts_beside_a_target_on_kernels(tmp_path: Path) -> None:
    """What it reads leaves a decoder of one call, and its head is the target's packed one."""
    home = compiled_home()
    target = TinyMtp("mimo", copies_last_token=True, hidden_size=128).save(tmp_path / "model", torch.bfloat16)
    flags = ["--dtype", "bfloat16", "--compile", "on", "--speculative-method"]
    said = []
    for more in (["none"], ["mtp", "--speculation-schedule", "sync", *ALWAYS]):
        async with engine_of(target, *flags, *more, home=home) as engine:
            assert engine.info.kernels.startswith("compiled")
            families = make_families(World(target, target, target, target, PHRASES), 6)
            said.append(await run(engine, families, 8, cuts=False))
    assert differences(*said) == []
    assert said[1].stats.num_accepted > 20
