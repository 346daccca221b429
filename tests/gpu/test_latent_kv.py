"""Models that store latent rows, on a GPU: against the reference, and as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.compute.attention import ReferenceAttention
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample
from engine.compute.sampling.sampler import Sampler
from tests.support.recurrent_classes import loaded_from, model_of

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.fused_model import with_fused_layers  # noqa: E402
from engine.compute.cuda.graphs.recorder import CudaRecorder  # noqa: E402
from engine.compute.cuda.triton_attention import TritonAttention  # noqa: E402

CUDA = torch.device("cuda", 0)
BLOCK_SIZE, NUM_SEQS, BLOCKS_EACH = 16, 6, 4


def load(name: str, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    model = model_of(name).to(CUDA, dtype)
    return replace(loaded_from(model), device=CUDA, dtype=dtype)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "KimiLinear"])
@torch.inference_mode()
def test_a_model_of_latent_rows_is_the_model(name: str) -> None:
    loaded = load(name)
    assert any(layer.value_in_key for layer in loaded.layers)
    forward = forward_of(loaded)
    assert isinstance(forward.backend, TritonAttention)
    found = packed_sample(forward, block_size=BLOCK_SIZE)
    forward.backend = ReferenceAttention()
    expected = packed_sample(forward, block_size=BLOCK_SIZE)
    assert packed_difference(found, expected, loaded.dtype, has_blocks=False) is None


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "KimiLinear"])
@torch.inference_mode()
def test_a_model_of_fused_attentions_is_the_model(name: str) -> None:
    loaded = load(name)
    before = packed_sample(forward_of(loaded), block_size=BLOCK_SIZE)
    fused = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    count = sum(layer.value_in_key for layer in loaded.layers)
    assert f"latent attention of {count} fused" in fused.kernels_used
    after = packed_sample(forward_of(fused), block_size=BLOCK_SIZE)
    assert packed_difference(after, before, loaded.dtype, has_blocks=False) is None


def test_numbers_of_full_precision_are_expanded() -> None:
    assert not any(layer.value_in_key for layer in load("DeepseekV3", torch.float32).layers)


def test_steps_are_recorded_and_give_the_eager_tokens() -> None:
    eager, plain = (
        ModelRunner(
            with_fused_layers(load("DeepseekV3"), BLOCK_SIZE, lambda: pytest.fail("the kernels do not run")),
            NUM_SEQS * BLOCKS_EACH,
            BLOCK_SIZE,
            Sampler(512, CUDA),
        )
        for _ in range(2)
    )
    limits = GraphLimits(NUM_SEQS, BLOCKS_EACH, max_tokens=128)
    ahead = CudaRunner(plain, 512, limits, CudaRecorder(CUDA), choose_draws(CUDA))
    ahead.warm_up()
    assert len(ahead.graphs.shapes) == len(limits.shapes())
    for mine, theirs in zip(ahead.kv.tensors, eager.kv.tensors, strict=True):
        theirs.copy_(mine.normal_())
    for decodes in (1, 3, NUM_SEQS):
        for stop in range(40, 44):
            parts = [
                Part(range(100), stop - 1, stop, range(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH))
                for row in range(decodes)
            ]
            inputs = pack_step(parts, BLOCK_SIZE)
            assert ahead.run(inputs).rows.token_ids == eager.run(inputs).rows.token_ids
