"""Gates that a model closes by a threshold of its own are those that it closes by ours, without waiting."""

from __future__ import annotations

import pytest
import torch

from engine.compute.runner.steady_sparsity import keep_sparsity
from tests.support.device_waits import WaitingRefused
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sparsity", [0.05, 0.5, 0.95])
@torch.inference_mode()
def test_the_same_gates_stay_open(sparsity: float, dtype: torch.dtype) -> None:
    pattern = [sparsity, 0.0, sparsity, 0.0]
    plain, steady = (
        tiny_model("gemma3n", dtype=dtype, activation_sparsity_pattern=pattern) for _ in range(2)
    )
    keep_sparsity(steady)
    keep_sparsity(steady)
    rows = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for theirs, ours in zip(plain.base_model.layers, steady.base_model.layers, strict=True):
        expected = theirs.mlp(rows)
        with WaitingRefused():  # type: ignore[no-untyped-call]
            found = ours.mlp(rows)
        assert torch.equal(found, expected)


def test_other_models_stay_as_they_are() -> None:
    model = tiny_model("llama")
    keep_sparsity(model)
    assert not any("_gaussian_topk" in vars(module) for module in model.modules())
