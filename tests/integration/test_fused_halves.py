"""Layers around latent attention whose sums are fused, in Triton's interpreter; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.attention import AttentionContext
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner import packed_forward
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample
from tests.support.attention_noise import Chunk, scattered_step
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.recurrent_classes import loaded_from, model_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import (  # noqa: E402
    fused_experts,
    fused_halves,
    fused_latent,
    fused_norms,
    fused_products,
    fused_router,
    triton_attention,
)
from engine.compute.cuda.fused_halves import FusedHalves, fuse_halves  # noqa: E402
from engine.compute.cuda.fused_latent import fuse_latent_attentions  # noqa: E402
from engine.compute.cuda.fused_model import fuse_experts, fuse_routers, fuse_sharing, with_fused_layers  # noqa: E402
from engine.compute.cuda.fused_parts import fuse_parts  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

BLOCK_SIZE = 4
MODELS = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu")


def backend() -> TritonAttention:
    return TritonAttention(Gpu(4, 200_000))


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend())


def load(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return replace(loaded_from(model_of(name).to(dtype)), dtype=dtype)


def with_parts(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A model whose attention, norms and MLPs are fused by themselves."""
    loaded = load(name, dtype)
    assert fuse_latent_attentions(loaded, backend(), BLOCK_SIZE) and fuse_parts(loaded, BLOCK_SIZE)
    return loaded


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_sums_are_fused_is_the_model(name: str) -> None:
    loaded = load(name)
    before = packed_sample(forward_of(loaded))
    found = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert found.kernels_used.endswith(f"sums of {len(loaded.layers)} layers with latent attention fused")
    layers: Any = found.model.base_model.layers
    assert all(type(layer) is FusedHalves for layer in layers)
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        is_linked = following is not None and layer.ends_in_sum
        assert layer.next_norm is (following.input_norm if is_linked else None)
    torch.testing.assert_close(packed_sample(forward_of(found)), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Glm4MoeLite", "MiniCPM3"])
def test_a_model_in_16_bits_is_rounded_as_the_model(name: str) -> None:
    loaded = load(name, torch.bfloat16)
    before = packed_sample(forward_of(loaded))
    found = with_fused_layers(loaded, BLOCK_SIZE, lambda: pytest.fail("the kernels do not run"))
    assert any(isinstance(module, FusedHalves) for module in found.model.modules())
    after = packed_sample(forward_of(found))
    assert packed_difference(after, before, torch.bfloat16, has_blocks=False) is None


@pytest.mark.parametrize("multiplier", [0.9, 1.1])
def test_a_layer_that_adds_otherwise_stays(multiplier: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = with_parts("MiniCPM3")
    layer: Any = loaded.model.base_model.layers[0]
    made = FusedHalves(layer)
    assert made.multiplier == layer.residual_scale != 1.0
    layer.residual_scale *= multiplier
    right = FusedHalves.__init__

    def other(self: FusedHalves, original: Any) -> None:
        right(self, original)
        self.multiplier = made.multiplier

    monkeypatch.setattr(FusedHalves, "__init__", other)
    assert fuse_halves(loaded, BLOCK_SIZE) == len(loaded.layers) - 1
    assert loaded.model.base_model.layers[0] is layer


@pytest.mark.parametrize("part", ["middle", "finished"])
def test_a_layer_whose_halves_answer_otherwise_stays(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, right = with_parts("Youtu"), getattr(FusedHalves, part)

    def other(*call: Any) -> Any:
        first, second = right(*call)
        return 1.1 * first, second

    monkeypatch.setattr(FusedHalves, part, other)
    assert fuse_halves(loaded, BLOCK_SIZE) == 0
    assert not any(isinstance(module, FusedHalves) for module in loaded.model.modules())


def test_a_layer_that_does_more_than_its_class_says_is_not_fused() -> None:
    loaded = with_parts("DeepseekV3")
    layer: Any = loaded.model.base_model.layers[0]
    assert FusedHalves.fits(layer)
    layer.register_forward_hook(lambda *_: None)
    assert not FusedHalves.fits(layer)
    layer = loaded.model.base_model.layers[1]
    layer.another = torch.nn.Identity()
    assert not FusedHalves.fits(layer)


# Launches of a layer with an MLP, and of one with experts between two others, but for merging.
LAUNCHES = {"DeepseekV3": (13, 15), "Glm4MoeLite": (13, 15), "MiniCPM3": (13, 13)}


@pytest.mark.parametrize(("name", "most"), LAUNCHES.items())
def test_a_layer_takes_few_launches(
    name: str, most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(name, torch.bfloat16)
    fuse_experts(loaded, BLOCK_SIZE), fuse_routers(loaded, BLOCK_SIZE)
    fuse_latent_attentions(loaded, backend(), BLOCK_SIZE), fuse_parts(loaded, BLOCK_SIZE)
    fuse_sharing(loaded, BLOCK_SIZE)
    count = LaunchCount()
    for module in (triton_attention, fused_latent, fused_norms, fused_products, fused_experts, fused_router):
        for kernel in [kernel for kernel in vars(module) if kernel.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, CountedKernel(kernel, count))
    monkeypatch.setattr(fused_halves, "is_close", lambda *_: True)
    monkeypatch.setattr("engine.compute.cuda.layer_links.is_close", lambda *_: True)
    assert fuse_halves(loaded, BLOCK_SIZE) == len(loaded.layers)
    inputs, num_blocks = scattered_step([Chunk(700), Chunk(3)], BLOCK_SIZE)
    context = AttentionContext(inputs, PackedForward(loaded).make_kv(num_blocks, BLOCK_SIZE), backend())
    hidden = torch.randn(1, 2, loaded.config.hidden_size, dtype=torch.bfloat16)
    rotation = loaded.model.base_model.rotary_emb(hidden, torch.tensor([[700, 3]]))
    options: dict[str, Any] = {"attention_mask": None, "slipstream_context": context}

    def launches_of(layer: Any, rows: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        answers: list[torch.Tensor] = []
        names = run_counted(
            count, lambda: answers.append(layer(rows, position_embeddings=rotation, **options))
        )
        return answers[0], [name for name in names if name != "merge_kernel"]

    for _ in range(2):  # the first time lays out the step's work
        rows, found = hidden, []
        for layer in loaded.model.base_model.layers:
            rows, names = launches_of(layer, rows)
            found.append(names)
    assert (len(found[0]), len(found[2])) == most, (found[0], found[2])
