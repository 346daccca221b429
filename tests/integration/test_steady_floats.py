"""In float32, too, a token's logits have the same bits in any company, where kernels compute the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.native.install import install
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.packed_forward import PackedForward
from tests.support.native import FLOAT32_FORM, compiled_kernels
from tests.support.packed import is_the_same_in_any_company, random_schedule, random_tokens
from tests.support.recurrent import run_pieces
from tests.support.recurrent_classes import loaded_from, model_of
from tests.support.speculated import single_threaded

_LATENTS = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "qk_head_dim": 96}
_DELTA = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
# What torch multiplies, or computes of every number, beside kernels: steps, gates of states, latents, gates
# of attention and of shared experts. Sizes are what kernels need, and so large that torch rounds by company.
CLASSES: dict[str, dict[str, Any]] = {
    "FalconMamba": {"time_step_rank": 64},
    "Jamba": {"mamba_dt_rank": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "Mamba": {"time_step_rank": 64},
    "RecurrentGemma": {"lru_width": 256, "head_dim": 32},
    "Zamba": {"mamba_dt_rank": 64, "attention_hidden_size": 128, "attention_head_dim": 32},
    "BailingHybrid": _LATENTS | {"head_dim": 32, "linear_head_dim": 32},
    "DeepseekV3": _LATENTS | {"head_dim": 32},
    "KimiLinear": _LATENTS | {"linear_head_dim": 32},
    "Laguna": {"head_dim": 32},
    "Lfm3": {"head_dim": 32},
    "Qwen3Next": _DELTA,
    "Qwen3_5Moe": _DELTA,
}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


@torch.inference_mode()
@pytest.mark.parametrize("name", CLASSES)
def test_a_token_has_its_bits_in_any_company(name: str) -> None:
    kernels = compiled_kernels(torch.float32, FLOAT32_FORM, formats=True)
    native = install(loaded_from(model_of(name, CLASSES[name])), kernels)
    if not native.keeps_state:
        assert is_the_same_in_any_company(PackedForward(native))
        return
    lengths = [50, 5, 30]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]
    forward = RecurrentForward(native)

    def logits(max_chunk: int) -> torch.Tensor:
        memory = StateMemory(forward, MemorySizes(num_blocks=64, block_size=4, num_slots=3))
        steps = random_schedule(np.random.default_rng(max_chunk), lengths, max_chunk)
        pieces = run_pieces(forward, memory, dict(enumerate(texts)), steps)
        return torch.cat([pieces[seat] for seat in range(3)])

    alone = logits(1)
    assert all(torch.equal(logits(most), alone) for most in (4, 32))
