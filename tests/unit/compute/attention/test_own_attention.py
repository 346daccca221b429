"""Rebound attention: the slopes are transformers' own, and nothing attends without a pass of ours."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi

from config import ModelSettings
from engine.compute.attention import ATTENTION_NAME, register
from engine.compute.attention.key_bias import KeyBias
from engine.compute.attention.own_attention import (
    EAGER,
    attend_with,
    attending_with,
    built_with,
    is_rebound,
)
from engine.compute.attention.rebindings import alibi_slopes, mpt_slopes
from engine.compute.loading.outline import outline_model
from engine.compute.loading.support import Architecture, find_model_class
from engine.errors import UnsupportedModel
from tests.support.tiny_models import REBOUND_FAMILIES, tiny_config, tiny_model

TOKENS = torch.tensor([[5, 9, 17, 33, 7]])


@pytest.mark.parametrize("num_heads", [1, 2, 4, 6, 7, 12, 32, 71])
def test_the_slopes_are_those_of_the_models(num_heads: int) -> None:
    ones, places = torch.ones(1, 300, dtype=torch.long), torch.arange(300)
    bloom = bloom_alibi(ones, num_heads, torch.float32)[:, 0]
    torch.testing.assert_close(KeyBias(alibi_slopes(num_heads)).at(places), bloom)
    falcon = falcon_alibi(ones, num_heads, torch.float32)[:, 0]
    rounded = KeyBias(alibi_slopes(num_heads), torch.bfloat16, 0.5).at(places)
    assert torch.equal(rounded, falcon * 0.5)
    mpt = mpt_alibi(num_heads, 300)[:, 0]
    own = KeyBias(mpt_slopes(num_heads)).at(places)
    torch.testing.assert_close(own - own[:, -1:], mpt - mpt[:, -1:], atol=1e-4, rtol=1e-5)


def test_a_bias_takes_positions_of_any_shape() -> None:
    bias = KeyBias(torch.tensor([1.0, 0.5])).at(torch.tensor([[0, 1, 1], [4, 5, 6]]))
    assert bias.tolist() == [[[0, 1, 1], [4, 5, 6]], [[0, 0.5, 0.5], [2, 2.5, 3]]]


@pytest.mark.parametrize("family", [name for name in REBOUND_FAMILIES if name != "hrm_text"])
def test_without_a_pass_such_a_model_computes_what_it_always_did_or_nothing(family: str) -> None:
    register()
    model = tiny_model(family)
    with torch.inference_mode():
        expected = model(TOKENS, use_cache=False).logits
        with attending_with(model, ATTENTION_NAME), pytest.raises(UnsupportedModel, match="keywords"):
            model(TOKENS, use_cache=False)
        assert torch.equal(model(TOKENS, use_cache=False).logits, expected)
        attend_with(model, ATTENTION_NAME)
        with attending_with(model, EAGER):
            assert torch.equal(model(TOKENS, use_cache=False).logits, expected)
        with pytest.raises(UnsupportedModel, match="keywords"):
            model(TOKENS, use_cache=False)


def test_only_such_a_model_is_built_with_another_attention() -> None:
    llama, falcon, gptj = (find_model_class(tiny_config(name)) for name in ("llama", "falcon", "gptj"))
    assert [is_rebound(each) for each in (llama, falcon, gptj)] == [False, True, True]
    assert [built_with(each, "ours") for each in (llama, falcon, gptj)] == ["ours", "sdpa", "eager"]


@pytest.mark.parametrize("family", REBOUND_FAMILIES)
def test_what_such_a_model_needs_is_known_without_its_weights(family: str) -> None:
    config = tiny_config(family)
    architecture = Architecture(config, find_model_class(config))
    outline = outline_model(architecture, torch.float32, ModelSettings(dtype="float32", device="cpu"))
    assert len(outline.layers) == config.num_hidden_layers
    assert all(layer.biased == (family in ("bloom", "falcon_alibi", "mpt")) for layer in outline.layers)
