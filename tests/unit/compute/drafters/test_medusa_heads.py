"""Heads on disk: what is written is what is read, and what does not fit the target is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.medusa_heads import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    MedusaHeads,
    load_medusa_heads,
    output_embedding,
)
from engine.compute.loading.loader import LoadedModel
from engine.errors import StartRefused
from tests.support.packed import load_tiny

TREE = DraftTree.of_paths([(0,), (1,), (0, 2)])
Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


def make_heads(target: LoadedModel, num_heads: int = 2) -> MedusaHeads:
    generator = torch.Generator().manual_seed(0)
    heads = MedusaHeads(target, num_heads, torch.arange(0, 512, 4), TREE)
    for parameter in heads.heads.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    return heads


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_heads(load_tiny("llama")).save(tmp_path)
    return tmp_path


def test_fresh_heads_guess_what_the_target_drew_last() -> None:
    target = load_tiny("llama")
    token_ids = torch.tensor([7, 3, 500])
    heads = MedusaHeads(target, 2, token_ids, TREE)
    hidden = torch.randn(5, 64)
    expected = output_embedding(target)(hidden)[:, token_ids]
    logits = heads(hidden)
    assert logits.shape == (5, 2, 3)
    torch.testing.assert_close(logits[:, 0], expected)
    torch.testing.assert_close(logits[:, 1], expected)
    torch.testing.assert_close(heads.guess(1, hidden), logits[:, 1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_what_is_saved_is_what_is_loaded(family: str, tmp_path: Path) -> None:
    target = load_tiny(family)
    heads = make_heads(target)
    heads.save(tmp_path)
    loaded = load_medusa_heads(tmp_path, target)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(loaded(hidden), heads(hidden), rtol=0, atol=0)
    assert loaded.tree == TREE
    assert loaded.token_ids.tolist() == heads.token_ids.tolist()
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_heads_serve_the_same_target_in_another_dtype(saved: Path) -> None:
    loaded = load_medusa_heads(saved, load_tiny("llama", torch.bfloat16))
    assert loaded(torch.randn(1, 64).bfloat16()).dtype is torch.bfloat16


def test_heads_may_have_projections_of_their_own(saved: Path) -> None:
    weights = load_file(saved / WEIGHTS_FILE)
    own = {f"heads.{k}.lm_head.weight": torch.randn(128, 64) for k in range(2)}
    save_file(weights | own, saved / WEIGHTS_FILE)
    change_config(saved, lambda config: config.update(tied_lm_head=False))
    loaded = load_medusa_heads(saved, load_tiny("llama"))
    hidden = torch.randn(3, 64)
    changed = hidden + torch.nn.functional.silu(
        hidden @ weights["heads.1.linear.weight"].T + weights["heads.1.linear.bias"]
    )
    torch.testing.assert_close(loaded(hidden)[:, 1], changed @ own["heads.1.lm_head.weight"].T)
    torch.testing.assert_close(loaded.guess(1, hidden), loaded(hidden)[:, 1])


def change_config(directory: Path, change: Callable[[Config], object]) -> None:
    config = json.loads((directory / CONFIG_FILE).read_text())
    change(config)
    (directory / CONFIG_FILE).write_text(json.dumps(config))


def change_weights(directory: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(directory / WEIGHTS_FILE)
    change(weights)
    save_file(weights, directory / WEIGHTS_FILE)


def refusal(directory: Path, family: str = "llama") -> str:
    with pytest.raises(StartRefused) as caught:
        load_medusa_heads(directory, load_tiny(family))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(model_type="medusa"), "model_type is 'medusa', expected 'slipstream-medusa'"),
        (lambda c: c.update(num_heads=0), "num_heads is 0"),
        (lambda c: c.update(num_heads=True), "num_heads is True"),
        (lambda c: c.update(num_heads=10**9), "the most is 32"),
        (lambda c: c.update(num_heads=3), "heads.2.linear.bias is missing"),
        (lambda c: c.update(hidden_size=65), "for a model with hidden_size 65, this one has 64"),
        (lambda c: c.update(vocab_size=500), "for a model with vocab_size 500, this one has 512"),
        (lambda c: c["base"].update(num_hidden_layers=9), "num_hidden_layers 9, this one has 2"),
        (lambda c: c["base"].update(model_type="gpt2"), "model_type gpt2, this one has llama"),
        (lambda c: c.pop("base"), "base must be an object"),
        (lambda c: c.update(num_token_ids=127), "token_ids must be 127 different ids below 512"),
        (lambda c: c.update(tied_lm_head=False), "heads.0.lm_head.weight is missing"),
        (lambda c: c.update(tree=None), "tree must be an object"),
        (lambda c: c["tree"].update(ranks="x"), "lists of numbers parents and ranks"),
        (lambda c: c["tree"].update(parents=[-1, -1, 5]), "tree is none: a node that comes before"),
        (lambda c: c["tree"].update(parents=[-1, 0, 1]), "3 deep"),
        (lambda c: c["tree"].update(ranks=[0, 1, 200]), "looks at 201 candidates"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    saved: Path, change: Callable[[Config], object], reason: str
) -> None:
    change_config(saved, change)
    assert reason in refusal(saved)


def poison(weights: Weights) -> None:
    weights["heads.1.linear.weight"][3, 5] = float("nan")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.pop("token_ids"), "lacks token_ids or base_sample"),
        (lambda w: w.update(token_ids=torch.arange(385, 513)), "128 different ids below 512"),
        (lambda w: w.update(token_ids=torch.zeros(128, dtype=torch.int64)), "128 different ids"),
        (lambda w: w.update(token_ids=torch.rand(128)), "128 different ids"),
        (lambda w: w.update(base_sample=w["base_sample"] + 0.1), "another model of the same shape"),
        (lambda w: w.update(base_sample=w["base_sample"][:9].clone()), "another model of the same shape"),
        (lambda w: w.pop("heads.0.linear.bias"), "heads.0.linear.bias is missing"),
        (lambda w: w.update({"heads.0.extra": torch.zeros(1)}), "heads.0.extra is not known"),
        (lambda w: w.update({"heads.0.linear.bias": torch.zeros(63)}), r"is [63], expected [64]"),
        (poison, "heads.1.linear.weight holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    saved: Path, change: Callable[[Weights], object], reason: str
) -> None:
    change_weights(saved, change)
    assert reason in refusal(saved)


def test_missing_and_damaged_files_are_refused(saved: Path) -> None:
    weights = (saved / WEIGHTS_FILE).read_bytes()
    (saved / WEIGHTS_FILE).write_bytes(weights[:-5])
    assert "damaged or incomplete" in refusal(saved)
    (saved / WEIGHTS_FILE).unlink()
    assert "there is no model.safetensors" in refusal(saved)
    (saved / CONFIG_FILE).write_text("[")
    assert "cannot be read" in refusal(saved)
    (saved / CONFIG_FILE).unlink()
    assert "there is no config.json" in refusal(saved)


def test_a_target_of_another_seed_is_another_model(saved: Path) -> None:
    change_config(saved, lambda config: config["base"].update(model_type="qwen2"))
    assert "another model of the same shape" in refusal(saved, "qwen2")
