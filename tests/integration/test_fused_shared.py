"""Mixtures whose shared expert adds what it answers, in Triton's interpreter; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.loading.loader import LoadedModel
from engine.compute.native.observation import observe
from engine.compute.runner import packed_forward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_difference, packed_sample
from tests.support.recurrent_classes import loaded_from, model_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.fused_model import fuse_experts, fuse_routers, fuse_sharing  # noqa: E402
from engine.compute.cuda.fused_parts import fuse_parts  # noqa: E402
from engine.compute.cuda.fused_shared import FusedSharing, equal_sharing  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)
    backend = TritonAttention(Gpu(4, 200_000))
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend)


def with_parts(name: str, dtype: torch.dtype) -> tuple[LoadedModel, list[str]]:
    """A model whose routers, experts and MLPs are fused, and the names of its mixtures."""
    loaded = replace(loaded_from(model_of(name).to(dtype)), dtype=dtype)
    fuse_experts(loaded, BLOCK_SIZE), fuse_routers(loaded, BLOCK_SIZE), fuse_parts(loaded, BLOCK_SIZE)
    modules = loaded.model.named_modules()
    return loaded, [name for name, module in modules if hasattr(module, "shared_experts")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["DeepseekV2", "Glm4MoeLite"])
def test_a_model_whose_shared_experts_add_is_the_model(name: str, dtype: torch.dtype) -> None:
    loaded, mixtures = with_parts(name, dtype)
    before = packed_sample(forward_of(loaded))
    assert mixtures and fuse_sharing(loaded, BLOCK_SIZE) == len(mixtures)
    assert all(type(loaded.model.get_submodule(mixture)) is FusedSharing for mixture in mixtures)
    after = packed_sample(forward_of(loaded))
    assert packed_difference(after, before, dtype, has_blocks=False) is None
    if dtype is torch.float32:
        torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_a_mixture_that_answers_otherwise_or_does_more_stays() -> None:
    loaded, mixtures = with_parts("Glm4MoeLite", torch.float32)
    mixture: Any = loaded.model.get_submodule(mixtures[0])
    seen = observe(loaded, mixtures[:1], BLOCK_SIZE).seen[mixtures[0]]
    assert equal_sharing(mixture, seen, torch.float32) is not None
    assert equal_sharing(mixture, replace(seen, output=1.1 * seen.output), torch.float32) is None
    assert FusedSharing.fits(mixture, torch.float32)
    mixture.register_forward_hook(lambda *_: None)
    assert not FusedSharing.fits(mixture, torch.float32)
    mixture = loaded.model.get_submodule(mixtures[1])
    mixture.shared_expert_gate = torch.nn.Identity()
    assert not FusedSharing.fits(mixture, torch.float32)
