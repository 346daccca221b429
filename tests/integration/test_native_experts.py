"""Every family whose experts the kernels compute: replaced where they stand, with a plain model's logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.compute.native.experts import NativeExperts
from engine.compute.native.families import EXPERTS, FAMILIES, has_read_experts
from engine.compute.native.install import install
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import packed_sample
from tests.matrix.reduced import causal_classes, reduced_config
from tests.support.native import compiled_kernels
from tests.support.packed import as_loaded
from tests.support.speculated import single_threaded

FLOAT32 = torch.float32
CLASSES = {
    model_class.__module__.split(".")[-2]: config_class
    for config_class, model_class in causal_classes()
    if model_class.__module__.split(".")[-2] in EXPERTS
}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


def fresh(family: str) -> PreTrainedModel:
    config = reduced_config(CLASSES[family])
    if family in FAMILIES:
        config.head_dim = 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=FLOAT32)
    for parameter in model.parameters():
        if not parameter.any():  # routers start at zero, which chooses nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False).eval()


def test_every_family_is_here() -> None:
    assert set(CLASSES) == EXPERTS


@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_experts_are_computed_by_the_kernels(family: str) -> None:
    plain = as_loaded(fresh(family))
    layers = sum(map(has_read_experts, plain.model.modules()))
    expected = packed_sample(PackedForward(plain))
    loaded = install(as_loaded(fresh(family)), compiled_kernels(FLOAT32))
    experts = [module for module in loaded.model.modules() if isinstance(module, NativeExperts)]
    assert len(experts) == layers > 0
    found = packed_sample(PackedForward(loaded))
    assert (found - expected).norm() <= 1e-4 * expected.norm()
