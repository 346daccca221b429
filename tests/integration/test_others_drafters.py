"""Drafters in others' layouts, through whole engines: the text is the same, and drafts are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from config import load_settings
from engine.compute.drafters.medusa_heads import load_medusa_heads
from engine.compute.drafters.medusa_published import WEIGHTS
from engine.compute.loading.loader import load_model
from tests.support.native import WITHOUT_KERNELS
from tests.support.repetitive_world import World, make_families, make_world
from tests.support.speculated import differences, single_threaded
from tests.support.speculation_matrix import ALWAYS, SETTINGS, speak_drafted, speak_plainly
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Models this small only wait for their threads."""
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def world(small: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("models"))


def publish_medusa(world: World, directory: Path) -> Path:
    """The world's Medusa heads as their authors would publish them: of all tokens."""
    settings = load_settings([str(world.target), "--dtype", "float32"], environ=WITHOUT_KERNELS)
    target = load_model(world.target, settings.model)
    heads = load_medusa_heads(world.medusa_heads, target)
    projection = target.model.get_output_embeddings().weight
    weights = {f"{k}.1.weight": projection.clone() for k in range(heads.num_heads)}
    for name, tensor in heads.heads.state_dict().items():
        head, rest = name.split(".", 1)
        weights[f"{head}.0.{rest}"] = tensor
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / WEIGHTS)
    config = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": 1, "base_model_name_or_path": "it"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.slow
async def test_published_medusa_heads_change_no_text(world: World, tmp_path: Path) -> None:
    families = make_families(world, 12)
    expected = await speak_plainly(world.target, families)
    heads = publish_medusa(world, tmp_path / "published")
    flags = ["--speculative-method", "medusa", "--medusa-heads", str(heads), *ALWAYS]
    found = await speak_drafted(world.target, flags, SETTINGS["crowd"], families, expected)
    assert differences(expected, found) == []
    assert min(found.stats.num_accepted, found.stats.num_proposed - found.stats.num_accepted) > 20


async def test_a_drafter_of_layers_changes_no_text_of_a_recurrent_model(tmp_path: Path) -> None:
    """It drafts chains there, since states are cut back along chains only."""
    target = save_tiny_model("qwen3_5_hybrid", tmp_path / "model")
    settings = load_settings([str(target), "--dtype", "float32"], environ=WITHOUT_KERNELS)
    heads = TinyEagle(load_model(target, settings.model)).save(tmp_path / "heads", "original")
    phrases = [[3 + (start * 5 + step) % 16 for step in range(14)] for start in range(20)]
    families = make_families(World(target, target, target, target, phrases), 16)
    expected = await speak_plainly(target, families)
    flags = ["--speculative-method", "heads", "--draft-heads", str(heads), *ALWAYS]
    flags += ["--speculation-schedule", "sync"]
    found = await speak_drafted(target, flags, SETTINGS["recompute"], families, expected)
    assert differences(expected, found) == []
    assert found.stats.proposed["heads"] > 10 and found.stats.num_fallbacks == 0
