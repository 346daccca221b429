"""A whole engine on a GPU says the same whether its steps are launched ahead or one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loop.engine_parts import AheadRunner, StepRunner
from tests.support.ahead_asks import OneByOne, StepCount, adjusted_families, plain_families
from tests.support.repetitive_world import save_repetitive_model
from tests.support.speculated import differences, engine_of, run

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FLAGS = ("--device", "cuda", "--kv-cache-memory", "64MiB", "--max-num-seqs", "8")


def as_it_is(runner: StepRunner) -> AheadRunner:
    """The runner that a GPU has."""
    assert isinstance(runner, AheadRunner)
    return runner


@pytest.mark.parametrize("method", ["none", "auto"])
async def test_text_is_the_same(method: str, tmp_path: Path) -> None:
    target, families = save_repetitive_model(tmp_path), plain_families(48)
    async with engine_of(target, *FLAGS, "--speculative-method", "none", wrap=OneByOne) as engine:
        expected = await run(engine, families, 4, cuts=False)
    count = StepCount()
    flags = (*FLAGS, "--speculative-method", method)
    async with engine_of(target, *flags, wrap=lambda runner: count.watch(runner, as_it_is)) as engine:
        found = await run(engine, families, 4)
    assert not differences(expected, found)
    assert count.num_ahead > (5 if method == "auto" else 30)


async def test_schemas_and_penalties_have_their_draws_wait_and_no_pass(tmp_path: Path) -> None:
    """All families ask for what the next draw hangs on: each step's pass is launched ahead all the same."""
    pytest.importorskip("llguidance")
    target, families = save_repetitive_model(tmp_path), adjusted_families(24)
    flags = (*FLAGS, "--speculative-method", "none")
    async with engine_of(target, *flags, wrap=OneByOne) as engine:
        expected = await run(engine, families, 4, cuts=False)
    count = StepCount()
    async with engine_of(target, *flags, wrap=lambda runner: count.watch(runner, as_it_is)) as engine:
        found = await run(engine, families, 4)
    assert not differences(expected, found)
    assert count.num_drawn_later > 30
