"""Gemma 4 on the compiled kernels: layers of two kinds, some of which project no keys or no values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig, PreTrainedConfig

from engine.compute.loading.loader import LoadedModel
from engine.compute.native.decoder import NativeDecoder
from engine.compute.native.experts import NativeExperts
from engine.compute.native.install import _stand_in, install, join_layers
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeAttention, NativeMlp, NativeNorm
from engine.compute.native.scratch import layer_numbers
from engine.compute.runner.packed_forward import PackedForward
from tests.support.native import FLOAT32_FORM, compiled_kernels
from tests.support.packed import as_loaded, plain_logits, random_schedule, random_tokens, run_schedule
from tests.support.speculated import single_threaded
from tests.support.tiny_models import BOS_ID, EOS_ID, MAX_POSITIONS, VOCAB_SIZE, WINDOW, random_model

NUM_LAYERS = 6
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": BOS_ID,
}
PLAIN = TINY | {"hidden_size_per_layer_input": 0}
# Each configuration, and how many norms of ours stand in its model.
CONFIGS: dict[str, tuple[PreTrainedConfig, int]] = {
    "dense": (Gemma4TextConfig(**PLAIN), 4 * NUM_LAYERS + 1),
    "another layer's keys and values": (
        Gemma4TextConfig(
            **TINY,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=VOCAB_SIZE,
        ),
        5 * NUM_LAYERS + 2,
    ),
    "keys for values": (
        Gemma4TextConfig(**PLAIN, attention_k_eq_v=True, num_global_key_value_heads=1, attention_bias=True),
        4 * NUM_LAYERS + 1,
    ),
    "experts": (
        Gemma4TextConfig(
            **PLAIN, enable_moe_block=True, num_experts=32, top_k_experts=4, moe_intermediate_size=32
        ),
        8 * NUM_LAYERS + 1,
    ),
    "all experts": (
        Gemma4TextConfig(
            **PLAIN, enable_moe_block=True, num_experts=4, top_k_experts=4, moe_intermediate_size=32
        ),
        8 * NUM_LAYERS + 1,
    ),
    "unified": (
        Gemma4UnifiedTextConfig(
            **TINY, num_kv_shared_layers=3, attention_k_eq_v=True, num_global_key_value_heads=1
        ),
        4 * NUM_LAYERS + 1,
    ),
}
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


def kernels_in(dtype: torch.dtype) -> NativeKernels:
    form = FLOAT32_FORM if dtype is FLOAT32 else "auto"
    return compiled_kernels(dtype, form, formats=True)


def fresh(kind: str, dtype: torch.dtype) -> LoadedModel:
    loaded = as_loaded(random_model(CONFIGS[kind][0], dtype=dtype))
    for layer in loaded.model.model.layers:
        layer.layer_scalar.fill_(0.75)
        layer.self_attn.q_norm.weight.mul_(0.2)  # nothing else keeps scores small
    return loaded


@pytest.mark.by_default
@pytest.mark.parametrize(
    ("kind", "dtype"),
    # Rounding sends rows to other experts, of the plain model as well, where not all are chosen.
    [
        (kind, dtype)
        for kind in CONFIGS
        for dtype in (FLOAT32, BFLOAT16)
        if (kind, dtype) != ("experts", BFLOAT16)
    ],
)
def test_logits_are_the_plain_models_in_any_schedule(kind: str, dtype: torch.dtype) -> None:
    exact, plain = fresh(kind, FLOAT32), fresh(kind, dtype)
    native = install(fresh(kind, dtype), kernels_in(dtype))
    parts = list(native.model.modules())
    assert sum(isinstance(part, NativeAttention) for part in parts) == NUM_LAYERS
    assert sum(isinstance(part, NativeMlp) for part in parts) == NUM_LAYERS
    assert sum(isinstance(part, NativeNorm) for part in parts) == CONFIGS[kind][1]
    assert sum(isinstance(part, NativeExperts) for part in parts) == NUM_LAYERS * ("experts" in kind)
    assert native.kernels is not None
    rng = np.random.default_rng(0)
    lengths = [53, 12, 30]
    sequences = [random_tokens(rng, length) for length in lengths]
    for block_size, steps in ((16, [[(0, 53)], [(1, 12), (2, 30)]]), (7, random_schedule(rng, lengths, 25))):
        packed = run_schedule(PackedForward(native), sequences, steps, block_size, rng)
        for found, tokens in zip(packed, sequences, strict=True):
            true = plain_logits(exact, tokens)
            theirs = (plain_logits(plain, tokens).float() - true).norm()
            assert (found.float() - true).norm() <= 2 * theirs + 1e-3 * true.norm()


@pytest.mark.parametrize("kind", sorted({*CONFIGS} - {"all experts"}))  # a router of four is torch's
def test_a_tokens_logits_are_the_same_bits_in_any_company(kind: str) -> None:
    native = PackedForward(install(fresh(kind, BFLOAT16), kernels_in(BFLOAT16)))
    lengths = [40, 5, 20]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]

    def logits(max_chunk: int) -> torch.Tensor:
        rng = np.random.default_rng(max_chunk)
        return torch.cat(run_schedule(native, texts, random_schedule(rng, lengths, max_chunk), 4, rng))

    alone = logits(1)
    assert all(torch.equal(logits(most), alone) for most in (2, 9, 32))


def joined(kind: str, dtype: torch.dtype) -> LoadedModel:
    loaded = install(fresh(kind, dtype), kernels_in(dtype))
    join_layers(loaded, kernels_in(dtype))
    return loaded


@pytest.mark.by_default
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("kind", sorted({*CONFIGS} - {"all experts"}))
def test_all_layers_in_one_call_give_the_bits_of_one_after_the_other(kind: str, dtype: torch.dtype) -> None:
    apart, together = install(fresh(kind, dtype), kernels_in(dtype)), joined(kind, dtype)
    _stand_in(apart, kernels_in(dtype))
    assert isinstance(together.model.base_model, NativeDecoder)
    lengths = [40, 5, 20]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]
    for max_chunk in (1, 9, 40):
        found = []
        for loaded in (apart, together):
            rng = np.random.default_rng(max_chunk)
            steps = random_schedule(rng, lengths, max_chunk)
            found.append(torch.cat(run_schedule(PackedForward(loaded), texts, steps, 4, rng)))
        assert torch.equal(*found)


def test_a_mixture_whose_router_is_not_ours_is_left_alone() -> None:
    assert not isinstance(joined("all experts", BFLOAT16).model.base_model, NativeDecoder)


@pytest.mark.parametrize("kind", ["another layer's keys and values", "experts"])
def test_the_bits_are_the_same_on_any_number_of_threads(kind: str) -> None:
    loaded, lengths = joined(kind, BFLOAT16), [40, 5, 20]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]
    found = []
    for threads in (1, 2, 3):
        kernels_in(BFLOAT16).team.resize(threads)
        rng = np.random.default_rng(0)
        found.append(
            torch.cat(run_schedule(PackedForward(loaded), texts, [[(0, 40), (1, 5), (2, 20)]], 4, rng))
        )
    kernels_in(BFLOAT16).team.resize(1)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_layers_take_no_more_than_is_foreseen(kind: str) -> None:
    loaded = joined(kind, BFLOAT16)
    if isinstance(loaded.model.base_model, NativeDecoder):
        of_layers = kernels_in(BFLOAT16).decoder_scratch(loaded.model.base_model._decoder)
        taken = of_layers + loaded.config.hidden_size
        assert taken <= layer_numbers(loaded.config, loaded.layers) <= 1.5 * taken


@pytest.mark.parametrize("staying", [(0,), (1, 2), (3, 5), (1, 4)])
def test_layers_that_stay_attend_beside_ours(staying: tuple[int, ...]) -> None:
    """Whether they write keys and values that ours read, or read what ours wrote."""
    kind = "another layer's keys and values"
    plain, changed = fresh(kind, FLOAT32), fresh(kind, FLOAT32)
    for index in staying:
        changed.model.model.layers[index].self_attn.register_forward_hook(lambda *_: None)
    native = install(changed, kernels_in(FLOAT32))
    ours = [isinstance(layer.self_attn, NativeAttention) for layer in native.model.model.layers]
    assert ours == [index not in staying for index in range(NUM_LAYERS)]
    tokens = random_tokens(np.random.default_rng(0), 40)
    steps = [[(0, 25)], *[[(0, 1)]] * 15]
    (found,) = run_schedule(PackedForward(native), [tokens], steps, 4, np.random.default_rng(1))
    expected = plain_logits(plain, tokens)
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("kind", ["another layer's keys and values", "keys for values"])
def test_keys_and_values_of_8_bits(kind: str) -> None:
    """As close as a number makes that is rounded to one of 8 bits or to the next."""
    plain = replace(fresh(kind, FLOAT32), kept_kv=torch.int8)
    native = install(replace(fresh(kind, FLOAT32), kept_kv=torch.int8), kernels_in(FLOAT32))
    tokens = random_tokens(np.random.default_rng(0), 40)
    found, expected = (
        run_schedule(
            PackedForward(loaded), [tokens], [[(0, 25)], *[[(0, 1)]] * 15], 4, np.random.default_rng(1)
        )[0]
        for loaded in (native, plain)
    )
    assert (found - expected).norm() <= 0.01 * expected.norm()


def test_a_layer_of_queries_alone_writes_nothing() -> None:
    """Its own projections of a step would have to be in the pages of the layer that it follows."""
    native = install(fresh("another layer's keys and values", FLOAT32), kernels_in(FLOAT32))
    layers = native.model.model.layers
    assert [layer.self_attn.form.kv_parts for layer in layers] == [2, 2, 2, 0, 0, 0]
    assert [layer.self_attn.qkv.out_features for layer in layers] == [256, 256, 512, 128, 128, 256]
    assert [shape.shares for shape in native.layers] == [None, None, None, 1, 1, 2]


def test_keys_for_values_are_packed_once() -> None:
    native = install(fresh("keys for values", FLOAT32), kernels_in(FLOAT32))
    sizes = [layer.self_attn.qkv.out_features for layer in native.model.model.layers]
    assert sizes == [4 * 32 + 2 * 2 * 32, 4 * 32 + 2 * 2 * 32, 4 * 64 + 64] * 2
