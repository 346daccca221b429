"""Recorded steps over the CUDA kernels, through Triton's interpreter on the CPU; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.attention import ReferenceAttention
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import StepInputs
from tests.support.attention_noise import numbers_in, write_noise
from tests.support.packed import as_loaded, load_tiny, random_tokens
from tests.support.recorded import Playback
from tests.support.recurrent import make_recurrent_runner, pack_slots
from tests.support.tiny_models import tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.fused_model import fuse_layers  # noqa: E402
from engine.compute.cuda.state_scans import TritonScans  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

BLOCK_SIZE = 4
TOKENS = random_tokens(np.random.default_rng(7), 80)
BLOCKS = [list(range(16 * row, 16 * row + 16)) for row in range(4)]


KEPT = {"as computed": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# By how much of itself a number may differ that is rounded the other way.
ONE_STEP = {None: 0.0, torch.int8: 2**-6, torch.float8_e4m3fn: 2**-3}


def make_plain(family: str, kept: torch.dtype | None = None, own: LoadedModel | None = None) -> ModelRunner:
    """Of a tiny model, or of the `own` one that is given."""
    loaded = replace(own or load_tiny(family), kept_kv=kept)
    runner = ModelRunner(loaded, 64, BLOCK_SIZE, Sampler(loaded.vocab_size, loaded.device))
    runner.forward.backend = ReferenceAttention()
    return runner


def make_ahead(family: str, kept: torch.dtype | None = None, own: LoadedModel | None = None) -> CudaRunner:
    plain = make_plain(family, kept, own)
    plain.forward.backend = TritonAttention(Gpu(4, 200_000))
    runner = CudaRunner(plain, 64, GraphLimits(3, max_blocks=16, max_draft_tokens=3), Playback())
    runner.graphs.record(Playback())
    assert runner.graphs.shapes
    return runner


def part(row: int, stop: int, count: int = 1, parents: tuple[int, ...] = ()) -> Part:
    return Part(TOKENS[row:], stop - count, stop, BLOCKS[row], parents)


STATEFUL = [
    {0: part(0, 9, 9), 2: part(2, 5, 5)},
    {2: part(2, 6), 0: part(0, 10)},
    {1: part(1, 21, 21), 2: part(2, 7)},
    {1: part(1, 22)},
]


STEPS = {
    "decodes": [part(0, 9), part(3, 60), part(1, 31)],
    "one decode": [part(2, 17)],
    "chains": [part(0, 12, 4, (-1, 0, 1)), part(1, 9), part(2, 50, 2, (-1,))],
    "a tree": [part(3, 20, 4, (-1, -1, 1)), part(1, 9)],
    "a short prompt": [part(1, 40), part(0, 6, 6)],
}


@pytest.fixture(autouse=True)
def all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_recorded_steps_are_the_plain_ones(family: str, name: str, kept: torch.dtype | None) -> None:
    plain, ahead = make_plain(family, kept), make_ahead(family, kept)
    for runner in (plain, ahead):
        write_noise(runner.kv, seed=3)
    replayed: list[object] = []
    ahead.pass_modules[0].register_forward_hook(lambda *_: replayed.append(1))
    inputs: StepInputs = pack_step(STEPS[name], BLOCK_SIZE, temperature=1.0)
    assert ahead.run(inputs).rows == plain.run(inputs).rows
    assert replayed
    step = ONE_STEP[kept]
    for mine, theirs in zip(numbers_in(ahead.kv), numbers_in(plain.kv), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4 + 4 * step, rtol=1e-4 + step)
        assert (mine - theirs).abs().mean() <= 1e-4


@pytest.mark.parametrize("family", ["olmo2", "cohere2", "gemma4"])
@pytest.mark.parametrize("name", ["decodes", "one decode", "a tree"])
def test_recorded_steps_of_fused_layers_are_the_plain_ones(family: str, name: str) -> None:
    own = as_loaded(tiny_model(family))
    assert fuse_layers(own, TritonAttention(Gpu(4, 200_000)), BLOCK_SIZE) == len(own.layers)
    plain, ahead = make_plain(family), make_ahead(family, own=own)
    for runner in (plain, ahead):
        write_noise(runner.kv, seed=3)
    replayed: list[object] = []
    ahead.pass_modules[0].register_forward_hook(lambda *_: replayed.append(1))
    inputs: StepInputs = pack_step(STEPS[name], BLOCK_SIZE, temperature=1.0)
    for _ in range(2):
        assert ahead.run(inputs).rows == plain.run(inputs).rows
    assert len(replayed) == 2
    for mine, theirs in zip(numbers_in(ahead.kv), numbers_in(plain.kv), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "qwen3_next_hybrid", "granite_hybrid"])
def test_recorded_steps_that_carry_state_are_the_plain_ones(family: str) -> None:
    plain, own = make_recurrent_runner(family), make_recurrent_runner(family)
    own.forward.loaded = replace(own.forward.loaded, state_kernel=TritonScans())
    own.forward.backend = TritonAttention(Gpu(4, 200_000))
    ahead = CudaRunner(own, 64, GraphLimits(3, 16, 3, max_tokens=64), Playback())
    ahead.graphs.record(Playback())
    replayed: list[object] = []
    ahead.pass_modules[0].register_forward_hook(lambda *_: replayed.append(1))
    for parts in STATEFUL:
        inputs = pack_slots(parts)
        assert ahead.run(inputs).rows == plain.run(inputs).rows
    assert len(replayed) == len(STATEFUL)
    for mine, theirs in zip(own.states.tensors, plain.states.tensors, strict=True):
        torch.testing.assert_close(mine[:4], theirs[:4], atol=1e-4, rtol=1e-4)
