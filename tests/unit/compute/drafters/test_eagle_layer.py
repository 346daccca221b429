"""An EAGLE-3 layer computes what the paper says, and what does not fit the target is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from engine.compute.drafters.eagle_layer import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    EagleLayer,
    EagleShape,
    fresh_config,
    load_eagle_layer,
)
from engine.compute.drafters.medusa_heads import output_embedding
from engine.errors import StartRefused
from tests.support.packed import load_tiny

TOKEN_IDS = torch.arange(3, 512, 4)


def make_layer() -> EagleLayer:
    target = load_tiny("llama")
    torch.manual_seed(0)
    return EagleLayer(target, fresh_config(target), EagleShape((0, 1, 1), 32), TOKEN_IDS).requires_grad_(
        False
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_layer().save(tmp_path, {"tokens": 5})
    return tmp_path


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((directory / CONFIG_FILE).read_text())
    change(values)
    (directory / CONFIG_FILE).write_text(json.dumps(values))


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(directory / WEIGHTS_FILE)
    change(weights)
    save_file(weights, directory / WEIGHTS_FILE)


def refusal(directory: Path) -> str:
    with pytest.raises(StartRefused) as refused:
        load_eagle_layer(directory, load_tiny("llama"))
    return str(refused.value)


def rotated(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding as its paper has it, pair by pair."""
    half = vector.shape[-1] // 2
    angles = position * 10000.0 ** -(torch.arange(half) / half)
    first, second = vector[..., :half], vector[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    )


def rms(vector: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * vector / (vector.square().mean(-1, keepdim=True) + eps).sqrt()


def test_a_row_alone_is_what_its_weights_say() -> None:
    layer = make_layer()
    weights = {name: tensor.double() for name, tensor in layer.state_dict().items()}
    eps = float(layer.config.rms_norm_eps)
    features = torch.randn(3 * 64)
    position, token_id = 9, 7
    hidden = layer.fuse(features)
    query, key, value = layer.project(hidden[None], torch.tensor([token_id]), torch.tensor([position]))

    fused = weights["fc.weight"] @ features.double()
    embedded = load_tiny("llama").model.get_input_embeddings().weight[token_id].double()
    both = torch.cat(
        [
            rms(embedded, weights["midlayer.input_layernorm.weight"], eps),
            rms(fused, weights["midlayer.hidden_norm.weight"], eps),
        ]
    )
    head_dim = int(layer.config.head_dim)
    heads = {
        part: (weights[f"midlayer.self_attn.{part}_proj.weight"] @ both).view(-1, head_dim) for part in "qkv"
    }
    close = torch.testing.assert_close
    close(query[0].double(), rotated(heads["q"], position), rtol=1e-4, atol=1e-5)
    close(key[0].double(), rotated(heads["k"], position), rtol=1e-4, atol=1e-5)
    close(value[0].double(), heads["v"], rtol=1e-4, atol=1e-5)

    attended = torch.randn(1, int(layer.config.num_attention_heads) * head_dim)
    after = fused + weights["midlayer.self_attn.o_proj.weight"] @ attended[0].double()
    normed = rms(after, weights["midlayer.post_attention_layernorm.weight"], eps)
    gate, up = (weights[f"midlayer.mlp.{part}_proj.weight"] @ normed for part in ("gate", "up"))
    output = after + weights["midlayer.mlp.down_proj.weight"] @ (functional.silu(gate) * up)
    found = layer.finish(hidden[None], attended)
    close(found[0].double(), output, rtol=1e-4, atol=1e-5)
    logits = output_embedding(load_tiny("llama")).weight[TOKEN_IDS].double() @ rms(
        output, weights["norm.weight"], eps
    )
    close(layer.logits(found)[0].double(), logits, rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_what_is_loaded(saved: Path) -> None:
    layer, loaded = make_layer(), load_eagle_layer(saved, load_tiny("llama"))
    assert loaded.state_dict().keys() == layer.state_dict().keys()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.token_ids.tolist() == TOKEN_IDS.tolist()
    assert loaded.shape == EagleShape((0, 1, 1), 32)
    output = torch.randn(2, 64)
    assert torch.equal(loaded.logits(output), layer.logits(output))


def test_rounded_weights_keep_the_angles_of_their_positions(saved: Path) -> None:
    loaded = load_eagle_layer(saved, load_tiny("llama", torch.bfloat16))
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.rotary.inv_freq, make_layer().rotary.inv_freq)


def test_a_published_checkpoint_brings_its_own_embeddings(saved: Path) -> None:
    torch.manual_seed(1)
    embedding, projection = torch.randn(512, 64), torch.randn(len(TOKEN_IDS), 64)
    change_config(saved, lambda config: config.pop("slipstream"))
    change_weights(saved, lambda weights: weights.pop("base_sample"))
    own = {"embed_tokens.weight": embedding, "lm_head.weight": projection}
    change_weights(saved, lambda weights: weights.update(own))
    layer = load_eagle_layer(saved, load_tiny("llama"))
    assert layer.shape == EagleShape((1, 1, 0), None)
    assert torch.equal(layer.embedding.weight, embedding)
    output = torch.randn(2, 64)
    torch.testing.assert_close(layer.logits(output), layer.norm(output) @ projection.T)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "expected LlamaForCausalLMEagle3"),
        (lambda c: c["slipstream"]["target"].update(num_hidden_layers=9), "for a model of"),
        (lambda c: c["slipstream"].update(feature_layers=[0, 1]), "feature_layers is [0, 1]"),
        (lambda c: c["slipstream"].update(feature_layers=[0, 1, 2]), "feature_layers is [0, 1, 2]"),
        (lambda c: c["slipstream"].update(window=0), "window is 0"),
        (lambda c: c.update(intermediate_size=9), "mlp.down_proj.weight is"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    change_config(saved, change)
    assert reason in refusal(saved)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.update(base_sample=w["base_sample"] + 0.1), "another model of the same shape"),
        (lambda w: w.pop("fc.weight"), "fc.weight is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra is not known"),
        (lambda w: w.update(d2t=w["d2t"] + 400), "ascending ids below 512"),
        (lambda w: w["norm.weight"].fill_(float("nan")), "norm.weight holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    change_weights(saved, change)
    assert reason in refusal(saved)


def test_missing_and_damaged_files_are_refused(saved: Path) -> None:
    weights = (saved / WEIGHTS_FILE).read_bytes()
    (saved / WEIGHTS_FILE).write_bytes(weights[:-5])
    assert "missing or damaged" in refusal(saved)
    (saved / WEIGHTS_FILE).unlink()
    assert "missing or damaged" in refusal(saved)
    (saved / CONFIG_FILE).unlink()
    assert "there is no config.json" in refusal(saved)
