"""What lies on a GPU beside a model's weights: whose files are counted for which flags, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config import Settings, load_settings
from engine.compute.drafters.draft_tree import DraftTree
from engine.compute.drafters.drafter_weights import eagle_bytes, medusa_bytes, mtp_bytes
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.compute.drafters.mtp_layouts import find_mtp
from engine.compute.loading.coded_weights import CodeKind
from engine.compute.loading.loader import LoadedModel, load_model
from engine.startup import build, kv_room, weights_beside
from engine.startup.build import load_parts
from engine.startup.doctor import diagnose
from engine.startup.weights_beside import WeightsBeside, foresee_weights_beside
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny
from tests.support.quantized_checkpoints import awq, save_quantized
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_embedders import make_model, save_embedder
from tests.support.tiny_models import save_tiny_model, tiny_model
from tests.support.tiny_mtp import TinyMtp

GPU = torch.device("cuda", 0)


def on_gpu(loaded: LoadedModel) -> LoadedModel:
    """The same as if it were there: its weights are not looked at."""
    return replace(loaded, device=GPU)


def settings_for(*flags: str) -> Settings:
    """Others are loaded on this machine's CPU: their sizes are the same there."""
    return load_settings(["a/model", "--device", "cpu", "--dtype", "float32", *flags], {})


def beside(*flags: str, target: LoadedModel | None = None, directory: Path | None = None) -> WeightsBeside:
    return foresee_weights_beside(settings_for(*flags), on_gpu(target or load_tiny("llama")), directory)


def bytes_of(model: Any) -> int:
    return sum(each.numel() * each.itemsize for each in model.parameters())


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyEagle(load_tiny("llama")).save(tmp_path_factory.mktemp("models") / "layer")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "heads"
    MedusaHeads(load_tiny("llama"), 2, torch.arange(0, 512, 4), DraftTree.of_paths([(0,)])).save(directory)
    return directory


def test_without_others_there_is_nothing() -> None:
    assert beside() == beside("--speculative-method", "none") == WeightsBeside(0, 0)


def test_a_cpu_sets_nothing_aside(draft: Path) -> None:
    settings = settings_for("--draft-model", str(draft))
    assert foresee_weights_beside(settings, load_tiny("llama"), None) == WeightsBeside()


def test_a_draft_models_weights_are_those_of_its_outline(draft: Path) -> None:
    plain = bytes_of(tiny_model("llama"))
    # Tables of angles are weights, too.
    assert plain <= beside("--draft-model", str(draft)).drafts < plain + 4096
    halved = settings_for("--draft-model", str(draft), "--dtype", "bfloat16")
    found = foresee_weights_beside(halved, on_gpu(load_tiny("llama")), None).drafts
    assert plain // 2 <= found < plain // 2 + 4096
    assert beside("--draft-model", str(draft), "--speculative-method", "ngram").drafts == 0


def test_a_draft_model_whose_codes_stay_counts_as_much_as_these(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_quantized(tmp_path, awq())
    unpacked = beside("--draft-model", str(tmp_path)).drafts
    monkeypatch.setattr(weights_beside, "kept_kinds", lambda *_: frozenset(CodeKind))
    assert 0 < beside("--draft-model", str(tmp_path)).drafts < 0.6 * unpacked


def test_heads_and_modules_count_as_they_are_chosen(layer: Path, heads: Path, tmp_path: Path) -> None:
    target = load_tiny("llama")
    of_layer, of_heads = eagle_bytes(layer, target), medusa_bytes(heads, target)
    assert 0 < of_layer != of_heads > 0
    assert beside("--draft-heads", str(layer)) == WeightsBeside(drafts=of_layer)
    assert beside("--medusa-heads", str(heads)) == WeightsBeside(drafts=of_heads)
    assert beside("--draft-heads", str(layer), "--speculative-method", "suffix").drafts == 0
    directory = TinyMtp("mimo").save(tmp_path)
    settings = load_settings([str(directory), "--dtype", "float32"], environ=WITHOUT_KERNELS)
    with_module = load_model(directory, settings.model)
    layout = find_mtp(directory, with_module.config)
    assert layout is not None
    of_module = mtp_bytes(directory, with_module, layout)
    assert beside(target=with_module, directory=directory) == WeightsBeside(drafts=of_module)
    assert beside("--speculative-method", "heads", target=with_module, directory=directory).drafts == 0


def test_a_draft_model_and_heads_add_up(draft: Path, layer: Path) -> None:
    both = beside("--draft-model", str(draft), "--draft-heads", str(layer))
    apart = (beside("--draft-model", str(draft)), beside("--draft-heads", str(layer)))
    assert both.drafts == sum(each.drafts for each in apart)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_an_embedding_model_counts_in_the_dtype_it_is_loaded_in(
    dtype: str, width: int, tmp_path: Path
) -> None:
    directory = save_embedder(tmp_path, heads=("Dense", "Dense", "Normalize"))
    numbers = sum(each.numel() for each in make_model("bert").parameters())
    behind = 2 * 4 * (16 * 32 + 16)  # which compute in float32
    found = beside("--embedding-model", str(directory), "--dtype", dtype)
    assert found == WeightsBeside(embeddings=numbers * width + behind)
    assert found.total == found.embeddings


def test_what_cannot_be_told_counts_as_nothing(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for flag in ("--draft-model", "--draft-heads", "--medusa-heads", "--embedding-model"):
        assert beside(flag, nowhere) == WeightsBeside()


def test_a_start_and_the_doctor_size_with_what_comes_and_measure_with_what_is_still_to_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = WeightsBeside(drafts=3, embeddings=5)
    asked: list[tuple[str, object]] = []

    def foresee(
        settings: Settings, target: LoadedModel, directory: Path | None, **may: bool
    ) -> WeightsBeside:
        assert directory == Path(settings.model.model)
        asked.append(("beside", may.get("may_fetch", True)))
        return told

    def foresee_room(*args: Any, **more: Any) -> kv_room.KvRoom:
        asked.append(("foreseen", args[3]))
        return kv_room.foresee_kv_room(*args, **more)

    def measure_room(*args: Any) -> kv_room.KvRoom:
        asked.append(("measured", args[5]))
        return kv_room.measure_kv_room(*args)

    for room in ("build", "doctor"):
        monkeypatch.setattr(f"engine.startup.{room}.foresee_weights_beside", foresee)
        monkeypatch.setattr(f"engine.startup.{room}.foresee_kv_room", foresee_room)
    monkeypatch.setattr(build, "measure_kv_room", measure_room)
    model = save_tiny_model("llama", tmp_path)
    settings = load_settings([str(model), "--kv-cache-memory", "1MiB", "--swap-space", "64KiB"], {})
    assert diagnose(settings).problems == []
    assert asked == [("beside", False), ("foreseen", 8)]
    asked.clear()
    load_parts(settings)
    assert asked == [("beside", True), ("foreseen", 8), ("measured", 5)]
