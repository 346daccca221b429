"""What drafters' weights will take, told by their files: as much as they take once they are loaded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from config import load_settings
from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.drafter_weights import eagle_bytes, medusa_bytes, mtp_bytes
from engine.compute.drafters.eagle_layer import load_eagle_layer
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.medusa_heads import MedusaHeads, load_medusa_heads
from engine.compute.drafters.medusa_published import load_published_medusa
from engine.compute.drafters.mtp_layouts import find_mtp
from engine.compute.drafters.mtp_module import load_mtp_module
from engine.compute.loading.loader import LoadedModel, load_model
from engine.errors import StartRefused
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_mtp import FAMILIES, TinyMtp
from tests.unit.compute.drafters.test_medusa_published import published

DTYPES = (torch.float32, torch.bfloat16)


def parameter_bytes(module: nn.Module) -> int:
    return sum(each.numel() * each.itemsize for each in module.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_medusa_heads_take_their_weights_and_the_targets_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    target = load_tiny("llama", dtype)
    heads = MedusaHeads(target, 2, torch.arange(0, 512, 4), DraftTree.of_paths([(0,), (0, 1)]))
    heads.save(tmp_path / "tied")
    loaded = load_medusa_heads(tmp_path / "tied", target)
    assert loaded.projection is not None
    assert medusa_bytes(tmp_path / "tied", target) == parameter_bytes(loaded)
    heads.give_own_projections()  # which hold whatever memory held
    with torch.no_grad():
        for weight in heads.parameters():
            weight.zero_()
    heads.save(tmp_path / "own")
    assert medusa_bytes(tmp_path / "own", target) == parameter_bytes(
        load_medusa_heads(tmp_path / "own", target)
    )


def test_published_medusa_heads_take_what_is_in_the_file(tmp_path: Path) -> None:
    target = load_tiny("llama", torch.bfloat16)
    published(tmp_path, num_blocks=2)
    assert medusa_bytes(tmp_path, target) == parameter_bytes(load_published_medusa(tmp_path, target))


def eagle_weights_bytes(directory: Path, target: LoadedModel) -> int:
    weights = EagleWeights.of(load_eagle_layer(directory, target))
    tensors = [getattr(weights, each.name) for each in fields(weights)]
    own = [each for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point()]
    if weights.embedding.weight.data_ptr() != target.model.get_input_embeddings().weight.data_ptr():
        own.append(weights.embedding.weight)
    return sum(each.numel() * each.itemsize for each in own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [{}, {"token_ids": torch.arange(0, 512, 2)}, {"hidden": 32}])
@pytest.mark.parametrize("layout", ["ours", "speculators"])
def test_an_eagle_layer_takes_its_weights_and_the_targets_rows(
    layout: str, own: dict[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    target = load_tiny("llama", dtype)
    directory = TinyEagle(target, **own).save(tmp_path / "layer", layout)  # type: ignore[arg-type]
    assert eagle_bytes(directory, target) == eagle_weights_bytes(directory, target)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_takes_its_own_weights_and_no_copies(family: str, tmp_path: Path) -> None:
    directory = TinyMtp(family).save(tmp_path)
    target, halved = (load_as(directory, dtype) for dtype in ("float32", "bfloat16"))
    layout = find_mtp(directory, target.config)
    assert layout is not None
    module = load_mtp_module(directory, target, layout)
    biases = [each for name, each in module.named_buffers() if name.endswith("e_score_correction_bias")]
    own = parameter_bytes(module) - parameter_bytes(module._read_norm)  # which is one of the target's
    told = mtp_bytes(directory, target, layout)
    assert told == own + sum(each.nbytes for each in biases)
    assert mtp_bytes(directory, halved, layout) == told // 2


def load_as(directory: Path, dtype: str) -> LoadedModel:
    settings = load_settings([str(directory), "--dtype", dtype], environ=WITHOUT_KERNELS)
    return load_model(directory, settings.model)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    target = load_tiny("llama")
    with pytest.raises(StartRefused, match="damaged or incomplete"):
        eagle_bytes(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(StartRefused, match="damaged or incomplete"):
        medusa_bytes(tmp_path, target)
