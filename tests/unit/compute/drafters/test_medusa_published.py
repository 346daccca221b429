"""Heads as Medusa's authors publish them: what a plain pass over their weights gives, or one line why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from engine.compute.drafters.drafter_weights import medusa_logits
from engine.compute.drafters.medusa import check_medusa, load_medusa
from engine.compute.drafters.medusa_published import WEIGHTS, is_published, load_published_medusa
from engine.errors import StartRefused
from tests.support.packed import load_tiny

Weights = dict[str, torch.Tensor]


def published(directory: Path, num_blocks: int = 1, num_heads: int = 3, prefix: str = "") -> Weights:
    """Write such a directory; its weights by their plain names."""
    draw = torch.Generator().manual_seed(1)
    weights: Weights = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            weights[f"{head}.{block}.linear.weight"] = 0.1 * torch.randn(64, 64, generator=draw)
            weights[f"{head}.{block}.linear.bias"] = 0.1 * torch.randn(64, generator=draw)
        weights[f"{head}.{num_blocks}.weight"] = torch.randn(512, 64, generator=draw)
    config = {
        "medusa_num_heads": 2,  # fewer than there are, as in published ones
        "medusa_num_layers": num_blocks,
        "base_model_name_or_path": "somebody/something",
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: tensor for name, tensor in weights.items()}, directory / WEIGHTS)
    return weights


def plain(weights: Weights, head: int, num_blocks: int, hidden: torch.Tensor) -> torch.Tensor:
    for block in range(num_blocks):
        name = f"{head}.{block}.linear"
        hidden = hidden + F.silu(hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
    return hidden @ weights[f"{head}.{num_blocks}.weight"].T


@pytest.mark.parametrize(("num_blocks", "prefix"), [(0, ""), (1, ""), (1, "medusa_head."), (3, "")])
def test_they_guess_as_a_plain_pass_does(num_blocks: int, prefix: str, tmp_path: Path) -> None:
    weights = published(tmp_path, num_blocks, prefix=prefix)
    heads = load_published_medusa(tmp_path, load_tiny("llama"))
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    assert heads.num_heads == 3 and heads.projection is None
    assert medusa_logits(tmp_path, load_tiny("llama")) == heads(hidden)[0].numel()
    for head in range(3):
        expected = plain(weights, head, num_blocks, hidden)
        torch.testing.assert_close(heads(hidden)[:, head], expected)
        torch.testing.assert_close(heads.guess(head, hidden), expected)
    assert not any(parameter.requires_grad for parameter in heads.parameters())


def test_a_drafter_of_them_has_a_tree_as_deep_as_there_are_heads(tmp_path: Path) -> None:
    published(tmp_path)
    check_medusa(tmp_path)
    drafter = load_medusa(tmp_path, load_tiny("llama", torch.bfloat16))
    assert 3 < drafter.num_nodes <= 32


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    published(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "medusa_lm_head.pt")
    assert "only medusa_lm_head.pt, which could run code when read" in refusal(tmp_path)


def test_ours_are_none_of_theirs(tmp_path: Path) -> None:
    assert not is_published(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "slipstream-medusa", "medusa_num_heads": 3}')
    assert not is_published(tmp_path)


def refusal(directory: Path) -> str:
    with pytest.raises(StartRefused) as caught:
        load_medusa(directory, load_tiny("llama"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0, expected a whole number of 1 to 32"),
        ({"medusa_num_heads": True}, "medusa_num_heads is True"),
        ({"medusa_num_heads": 4}, "holds 3 heads, expected 4"),
        ({"medusa_num_layers": "one"}, "medusa_num_layers is 'one'"),
        ({"medusa_num_layers": 2}, "0.1.weight is not known in heads of 2 blocks"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    values: dict[str, object], reason: str, tmp_path: Path
) -> None:
    published(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"0.1.weight": torch.zeros(513, 64)}, "guess 513 tokens, this model has 512"),
        ({"0.1.weight": torch.zeros(3, 64)}, "guess 3 tokens"),
        ({"0.1.weight": torch.tensor(1.0)}, "guess 0 tokens"),
        ({"1.1.weight": torch.zeros(512, 65)}, "is [512, 65], expected [512, 64]"),
        ({"1.0.linear.bias": torch.full((64,), torch.nan)}, "holds NaN"),
        ({"4.1.weight": torch.zeros(512, 64)}, "is missing"),
        ({"lm_head.weight": torch.zeros(1)}, "lm_head.weight is not known"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes: Weights, reason: str, tmp_path: Path) -> None:
    weights = published(tmp_path)
    save_file(weights | changes, tmp_path / WEIGHTS)
    assert reason in refusal(tmp_path)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-5])
    assert "is damaged" in refusal(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert "there is no medusa_lm_head.safetensors in it." in refusal(tmp_path)
    with pytest.raises(StartRefused, match="there is no medusa_lm_head"):
        check_medusa(tmp_path)
