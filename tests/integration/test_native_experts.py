"""Every family whose experts the kernels compute: replaced where they stand, with a plain model's logits."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from config import load_settings
from engine.compute.loading.loader import load_model
from engine.compute.native.experts import NativeExperts
from engine.compute.native.families import EXPERTS, FAMILIES, UNGATED_EXPERTS, has_read_experts
from engine.compute.native.install import install, with_kernels
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_sample
from tests.matrix.reduced import causal_classes, reduced_config
from tests.support.native import FLOAT32_FORM, compiled_home, compiled_kernels
from tests.support.packed import as_loaded
from tests.support.speculated import single_threaded
from tests.support.tiny_models import GEMMA4_EXPERTS, tiny_tokenizer

FLOAT32 = torch.float32
MAPS = Path("/proc/self/maps")
READ = EXPERTS | UNGATED_EXPERTS


@cache
def classes() -> Mapping[str, type[PretrainedConfig]]:
    """The configuration of each family that has them; to find it imports every model of transformers."""
    return {
        model_class.__module__.split(".")[-2]: config_class
        for config_class, model_class in causal_classes()
        if model_class.__module__.split(".")[-2] in READ and model_class.__name__.endswith("ForCausalLM")
    }


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


def fresh(family: str) -> PreTrainedModel:
    config = reduced_config(classes()[family])
    if family in FAMILIES and family != "olmoe":  # whose heads are as wide as rows allow
        config.head_dim = 32
    if family == "gemma4":  # which has none unless it is asked to
        config.update(GEMMA4_EXPERTS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=FLOAT32)
    for parameter in model.parameters():
        if not parameter.any():  # routers start at zero, which chooses nothing
            torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False).eval()


def test_every_family_is_here() -> None:
    assert set(classes()) == READ


@pytest.mark.parametrize("family", sorted(READ))
def test_experts_are_computed_by_the_kernels(family: str) -> None:
    plain = as_loaded(fresh(family))
    layers = sum(map(has_read_experts, plain.model.modules()))
    expected = packed_sample(forward_of(plain))
    loaded = install(as_loaded(fresh(family)), compiled_kernels(FLOAT32, FLOAT32_FORM, formats=True))
    experts = [module for module in loaded.model.modules() if isinstance(module, NativeExperts)]
    assert len(experts) == layers > 0
    found = packed_sample(forward_of(loaded))
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux tells what is mapped")
@pytest.mark.parametrize("family", ["granitemoe", "qwen3_moe"])
def test_no_weight_holds_its_file(family: str, tmp_path: Path) -> None:
    """Not even those of a router that stays: else a model would take its memory twice."""
    fresh(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    flags = ("--dtype", "float32", "--kv-cache-memory", "4MiB", "--max-model-len", "64")
    kernels = ("--cpu-kernels", FLOAT32_FORM, "--compile")
    home = compiled_home(FLOAT32, FLOAT32_FORM, formats=True)
    plain = load_model(tmp_path, load_settings(["m", *flags, *kernels, "off"], environ={}).model)
    assert str(tmp_path) in MAPS.read_text()
    settings = load_settings(["m", *flags, *kernels, "on"], environ={}).model
    loaded = with_kernels(plain, settings, home, lambda: plain)
    gc.collect()
    assert loaded.model is plain.model and str(tmp_path) not in MAPS.read_text()
