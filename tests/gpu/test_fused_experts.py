"""Fused experts on a GPU, against numbers in float64, and a model of them as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.draw_choice import choose_draws
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.families import has_read_experts
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.model_runner import ModelRunner
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample
from engine.compute.sampling.sampler import Sampler
from tests.support.device_waits import waiting_refused
from tests.support.packed import as_loaded, random_tokens
from tests.support.tiny_models import GEMMA4_EXPERTS, NEMOTRON_EXPERTS, tiny_model

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.expert_layout import FEW_ROWS, rows_of_each_layout  # noqa: E402
from engine.compute.cuda.fused_experts import FusedExperts  # noqa: E402
from engine.compute.cuda.fused_model import fuse_experts, fuse_layers, with_fused_layers  # noqa: E402
from engine.compute.cuda.graphs.recorder import CudaRecorder  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402

CUDA = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Each with the layers that have experts, and those of all that are fused.
FAMILIES = {
    "mixtral": (2, 2),
    "olmoe": (2, 2),
    "qwen2_moe": (2, 2),
    "qwen3_moe": (1, 2),
    "gpt_oss": (2, 2),
    "gemma4": (4, 4),
}
CHANGES: dict[str, dict[str, Any]] = {"gemma4": GEMMA4_EXPERTS, "nemotron_h_hybrid": NEMOTRON_EXPERTS}
# Experts, hidden, width, and how many a row chooses: Qwen3-30B-A3B's, a few of Mixtral's, and uneven ones.
SHAPES = [(128, 2048, 768, 8), (4, 4096, 14336, 2), (6, 80, 200, 3)]
GEMMA4 = (128, 2816, 704, 8)
NEMOTRON = (128, 2688, 1856, 6)  # Nemotron 3 Nano's, which have no gates
BLOCK_SIZE = 16
NUM_SEQS, BLOCKS_EACH = 12, 8
TOKENS = random_tokens(np.random.default_rng(7), BLOCKS_EACH * BLOCK_SIZE + NUM_SEQS)
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def load(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return replace(
        as_loaded(tiny_model(family, dtype=dtype, **CHANGES.get(family, {})).to(CUDA)), device=CUDA
    )


def make(
    shape: tuple[int, int, int, int], dtype: torch.dtype, activation: str = "silu", *, is_gated: bool = True
) -> FusedExperts:
    """Random experts of this shape, with the activation that transformers calls so."""
    count, hidden, width, _ = shape
    family, first, outputs = (
        ("qwen3_moe", "gate_up_proj", 2 * width) if is_gated else ("nemotron_h_hybrid", "up_proj", width)
    )
    original: Any = next(
        each for each in tiny_model(family, **CHANGES.get(family, {})).modules() if has_read_experts(each)
    )
    weights = torch.randn(count, outputs, hidden, device=CUDA, dtype=dtype) / hidden**0.5
    down = torch.randn(count, hidden, width, device=CUDA, dtype=dtype) / width**0.5
    setattr(original, first, nn.Parameter(weights, requires_grad=False))
    original.down_proj = nn.Parameter(down, requires_grad=False)
    original.act_fn = ACT2FN[activation]
    return FusedExperts(original)


def given(num_rows: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Given:
    count, hidden, _, each = shape
    shares, chosen = torch.randn(num_rows, count, device=CUDA).softmax(1).topk(each)
    return torch.randn(num_rows, hidden, device=CUDA, dtype=dtype), chosen, shares.to(dtype)


def expected(
    experts: FusedExperts,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    activation: str = "silu",
) -> Any:
    """In float64, expert after expert."""
    found = torch.zeros(rows.shape, dtype=torch.float64, device=CUDA)
    for expert in set(chosen.flatten().tolist()):
        at, places = (chosen == expert).nonzero(as_tuple=True)
        outputs = rows[at].double() @ experts.gate_up_proj[expert].double().T
        if experts.shape.is_gated:
            gate, up = outputs.chunk(2, dim=1)
            activated = ACT2FN[activation](gate) * up
        else:
            activated = ACT2FN[activation](outputs)
        answers = activated @ experts.down_proj[expert].double().T
        found.index_add_(0, at, answers * shares[at, places, None].double())
    return found.to(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_answers_are_those_of_the_experts(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    experts = make(shape, dtype)
    for count in (*rows_of_each_layout(shape[3], experts.shape), 5, 17, 40):
        rows = given(count, shape, dtype)
        assert is_close(experts(*rows), expected(experts, *rows)), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
@torch.inference_mode()
def test_answers_are_those_of_experts_gated_by_gelu(activation: str, dtype: torch.dtype) -> None:
    experts = make(GEMMA4, dtype, activation)
    for count in (*rows_of_each_layout(GEMMA4[3], experts.shape), 17):
        rows = given(count, GEMMA4, dtype)
        assert is_close(experts(*rows), expected(experts, *rows, activation)), count


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_answers_are_those_of_experts_without_gates(dtype: torch.dtype) -> None:
    experts = make(NEMOTRON, dtype, "relu2", is_gated=False)
    for count in (*rows_of_each_layout(NEMOTRON[3], experts.shape), 17):
        rows = given(count, NEMOTRON, dtype)
        assert is_close(experts(*rows), expected(experts, *rows, "relu2")), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    experts, rows = make(shape, dtype), given(FEW_ROWS, shape, dtype)
    together = experts(*rows)
    for count in (1, 2, 15, 16, 17, 33):
        assert torch.equal(experts(*(each[:count] for each in rows)), together[:count]), count
        assert torch.equal(experts(*(each[-count:] for each in rows)), together[-count:]), count
    order = torch.randperm(FEW_ROWS, device=CUDA)
    assert torch.equal(experts(*(each[order] for each in rows)), together[order])


@torch.inference_mode()
def test_rows_that_all_choose_the_same_experts() -> None:
    shape = SHAPES[0]
    experts, (rows, chosen, shares) = make(shape, torch.bfloat16), given(300, shape, torch.bfloat16)
    chosen[:] = chosen[0]
    assert is_close(experts(rows, chosen, shares), expected(experts, rows, chosen, shares))


@torch.inference_mode()
def test_a_recorded_call_follows_what_is_chosen_and_waits_for_nothing() -> None:
    shape = SHAPES[0]
    experts, rows = make(shape, torch.bfloat16), given(20, shape, torch.bfloat16)
    found = torch.empty_like(rows[0])

    def work() -> None:
        found.copy_(experts(*rows))

    replay = CudaRecorder(CUDA).record(work)
    for _ in range(3):
        for own, other in zip(rows, given(20, shape, torch.bfloat16), strict=True):
            own.copy_(other)
        with waiting_refused():
            replay()
        assert torch.equal(found, experts(*rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_fused_experts_is_the_model(family: str, dtype: torch.dtype) -> None:
    loaded = load(family, dtype)
    before = packed_sample(PackedForward(loaded))
    num_experts, num_layers = FAMILIES[family]
    assert fuse_experts(loaded, BLOCK_SIZE) == num_experts
    assert fuse_layers(loaded, TritonAttention(Gpu.of(CUDA)), BLOCK_SIZE) == num_layers
    assert packed_difference(packed_sample(PackedForward(loaded)), before, dtype, has_blocks=False) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "num_experts"),
    [("qwen3_next_hybrid", 2), ("granite_hybrid_moe", 3), ("nemotron_h_hybrid", 2)],
)
def test_a_model_that_carries_state_with_fused_experts_is_the_model(
    family: str, num_experts: int, dtype: torch.dtype
) -> None:
    loaded = load(family, dtype)
    before = packed_sample(forward_of(loaded))
    fused = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert f"experts of {num_experts} fused" in fused.kernels_used
    assert packed_difference(packed_sample(forward_of(fused)), before, dtype, has_blocks=False) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_a_mixture_are_recorded_and_give_the_eager_tokens(family: str) -> None:
    """Those of the model as it was before, step after step, each with other experts."""
    eager = ModelRunner(load(family), NUM_SEQS * BLOCKS_EACH, BLOCK_SIZE, Sampler(512, CUDA))
    fused = with_fused_layers(load(family), BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert f"experts of {FAMILIES[family][0]} fused" in fused.kernels_used
    limits = GraphLimits(NUM_SEQS, BLOCKS_EACH, max_tokens=128)
    plain = ModelRunner(fused, NUM_SEQS * BLOCKS_EACH, BLOCK_SIZE, Sampler(512, CUDA))
    ahead = CudaRunner(plain, 512, limits, CudaRecorder(CUDA), choose_draws(CUDA))
    ahead.warm_up()
    assert len(ahead.graphs.shapes) == len(limits.shapes())
    for mine, theirs in zip(ahead.kv.tensors, eager.kv.tensors, strict=True):
        theirs.copy_(mine.normal_())
    for decodes in (1, 5, NUM_SEQS):
        for stop in range(40, 44):
            parts = [
                Part(TOKENS[row:], stop - 1, stop, range(row * BLOCKS_EACH, (row + 1) * BLOCKS_EACH))
                for row in range(decodes)
            ]
            inputs = pack_step(parts, BLOCK_SIZE)
            assert ahead.run(inputs).rows.token_ids == eager.run(inputs).rows.token_ids
