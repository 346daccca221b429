"""Fused latent attention in Triton's interpreter, against transformers' own; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.attention import AttentionContext
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.outline import weight_bytes
from engine.compute.runner import packed_forward
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import logits_distance, packed_difference, packed_sample
from tests.support.attention_noise import Chunk, scattered_step
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.recurrent_classes import loaded_from, model_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import (  # noqa: E402
    fused_latent,
    fused_norms,
    fused_parts,
    fused_products,
    triton_attention,
)
from engine.compute.cuda.fused_latent import FusedLatentAttention, fuse_latent_attentions  # noqa: E402
from engine.compute.cuda.fused_model import with_fused_layers  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

BLOCK_SIZE = 4
# Each with what its configuration says otherwise.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries at once": ("DeepseekV3", {"q_lora_rank": None}),
    "angles in halves": ("DeepseekV3", {"rope_interleave": False}),
    **{
        name: (name, {})
        for name in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "KimiLinear", "MiniCPM3", "Youtu")
    },
}
BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def backend() -> TritonAttention:
    return TritonAttention(Gpu(4, 200_000))


def load(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    class_name, changes = MODELS[name]
    return replace(loaded_from(model_of(class_name, changes).to(dtype)), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_fused_attentions_is_the_model(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_numbers(monkeypatch)
    loaded = load(name, dtype)
    before = packed_sample(forward_of(loaded))
    latent = sum(layer.value_in_key for layer in loaded.layers)
    assert latent and fuse_latent_attentions(loaded, backend(), BLOCK_SIZE) == latent
    forward = forward_of(loaded)
    forward.backend = backend()
    after = packed_sample(forward)
    assert packed_difference(after, before, dtype, has_blocks=False) is None
    if dtype is torch.float32:
        torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", BYTES.values(), ids=BYTES)
def test_rows_in_bytes_are_those_of_an_attention_that_stays(
    kept: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_numbers(monkeypatch)
    loaded = replace(load("DeepseekV3"), kept_kv=kept)
    forward = forward_of(loaded)
    plain, kept_plain = packed_sample(forward), packed_sample(forward, kept)
    assert fuse_latent_attentions(loaded, backend(), BLOCK_SIZE) == len(loaded.layers)
    forward = forward_of(loaded)
    forward.backend = backend()
    distance = logits_distance(packed_sample(forward, kept), kept_plain)
    assert distance < logits_distance(kept_plain, plain) / 10


@pytest.mark.parametrize("kept", [None, *BYTES.values()], ids=["plain", *BYTES])
@torch.inference_mode()
def test_what_is_not_finite_shows_in_the_tokens_that_see_it_alone(
    kept: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_numbers(monkeypatch)
    loaded = load("DeepseekV3", torch.bfloat16)
    fuse_latent_attentions(loaded, backend(), BLOCK_SIZE)
    forward = PackedForward(loaded)
    attention: Any = loaded.model.base_model.layers[0].self_attn
    inputs = pack_step([Part([0] * 9, 0, 9, range(3)), Part([0] * 5, 0, 5, range(3, 6))], BLOCK_SIZE)
    hidden = torch.randn(1, 14, loaded.config.hidden_size).to(torch.bfloat16)
    rotation = loaded.model.base_model.rotary_emb(hidden, torch.from_numpy(inputs.positions)[None])

    def answer() -> torch.Tensor:
        context = AttentionContext(inputs, forward.make_kv(6, BLOCK_SIZE, kept), backend())
        answered: torch.Tensor = attention(hidden, rotation, slipstream_context=context)[0][0]
        return answered

    sound = answer()
    hidden[0, 6] = torch.nan
    found = answer()
    assert (
        found[6:9].isnan().all() and torch.equal(found[:6], sound[:6]) and torch.equal(found[9:], sound[9:])
    )


def test_places_that_no_token_fills_store_nothing() -> None:
    loaded = load("DeepseekV3")
    fuse_latent_attentions(loaded, backend(), BLOCK_SIZE)
    inputs = pack_step([Part([0] * 3, 0, 3, [0])], BLOCK_SIZE)
    inputs = replace(inputs, slot_mapping=inputs.slot_mapping * 0 - 1)
    kv = PackedForward(loaded).make_kv(1, BLOCK_SIZE)
    hidden = torch.randn(1, 3, loaded.config.hidden_size)
    model: Any = loaded.model.base_model
    rotation = model.rotary_emb(hidden, torch.arange(3)[None])
    model.layers[0].self_attn(hidden, rotation, slipstream_context=AttentionContext(inputs, kv, backend()))
    assert not any(tensor.any() for tensor in kv.tensors)


@pytest.mark.parametrize(("name", "most"), [("queries at once", 7), ("DeepseekV3", 9), ("MiniCPM3", 9)])
def test_an_attention_is_nine_launches(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(name, torch.bfloat16)
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend())
    with_all_numbers(monkeypatch)
    layer: Any = loaded.model.base_model.layers[0]
    original = layer.self_attn
    assert fuse_latent_attentions(loaded, backend(), BLOCK_SIZE)
    count = LaunchCount()
    for module in (triton_attention, fused_latent, fused_norms, fused_products, fused_parts):
        for kernel in [kernel for kernel in vars(module) if kernel.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, CountedKernel(kernel, count))
    inputs, num_blocks = scattered_step([Chunk(700), Chunk(3)], BLOCK_SIZE)
    context = AttentionContext(inputs, PackedForward(loaded).make_kv(num_blocks, BLOCK_SIZE), backend())
    hidden = torch.randn(1, 2, loaded.config.hidden_size, dtype=torch.bfloat16)
    rotation = loaded.model.base_model.rotary_emb(hidden, torch.tensor([[700, 3]]))
    options: dict[str, Any] = {"attention_mask": None, "slipstream_context": context}
    run_counted(count, lambda: original(hidden, position_embeddings=rotation, **options))
    before = run_counted(count, lambda: original(hidden, position_embeddings=rotation, **options))
    ours = run_counted(count, lambda: layer.self_attn(hidden, position_embeddings=rotation, **options))
    assert len(ours) <= most + ours.count("merge_kernel") and len(before) >= 3 * len(ours), (ours, before)


def test_a_model_says_what_was_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend())
    loaded = load("Glm4MoeLite")
    before = packed_sample(forward_of(loaded))
    found = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert f"latent attention of {len(loaded.layers)} fused" in found.kernels_used
    after = packed_sample(forward_of(found))
    assert packed_difference(after, before, loaded.dtype, has_blocks=False) is None


def test_weights_are_there_once_and_counted() -> None:
    loaded = load("DeepseekV3")
    before = weight_bytes(loaded.model)
    assert fuse_latent_attentions(loaded, backend(), BLOCK_SIZE) == len(loaded.layers)
    assert weight_bytes(loaded.model) == before


def test_an_attention_that_answers_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("DeepseekV3")
    forward = FusedLatentAttention.forward

    def other(self: FusedLatentAttention, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return 1.1 * forward(self, *args, **options)[0], None

    monkeypatch.setattr(FusedLatentAttention, "forward", other)
    assert fuse_latent_attentions(loaded, backend(), BLOCK_SIZE) == 0


def test_an_attention_that_does_more_than_its_class_says_is_not_fused() -> None:
    loaded = load("DeepseekV3")
    forward_of(loaded)
    attention: Any = loaded.model.base_model.layers[0].self_attn
    assert FusedLatentAttention.fits(attention, torch.float32)
    assert not FusedLatentAttention.fits(attention, torch.bfloat16)
    attention.kv_a_layernorm.register_forward_hook(lambda *_: None)
    assert not FusedLatentAttention.fits(attention, torch.float32)
