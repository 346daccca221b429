"""The list of the models on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.utils._cache_manager as cache_manager
import pytest

from engine.startup import stored_models
from engine.startup.diagnosis import StoredModel
from engine.startup.stored_models import list_models
from tests.support.tiny_embedders import save_cross_encoder, save_embedder
from tests.support.tiny_gguf import save_tiny_gguf
from tests.support.tiny_models import save_tiny_model

MAIN, OTHER = "0" * 40, "1" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub; nothing is built in."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(cache_manager, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(stored_models, "BUILT_IN", {})
    return cache


def snapshot(cache: Path, repo: str, commit: str = MAIN, ref: str = "main") -> Path:
    """A repo's snapshot in the cache, still empty."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    return folder / "snapshots" / commit


def listed(tmp_path: Path) -> dict[str, StoredModel]:
    return {
        each.name if each.revision is None else f"{each.name}@{each.revision}": each
        for each in list_models(tmp_path / "home")[0]
    }


def test_there_may_be_nothing(cache: Path, tmp_path: Path) -> None:
    assert list_models(tmp_path / "home") == ([], [])


def test_a_cache_that_is_no_folder_is_a_warning(cache: Path, tmp_path: Path) -> None:
    cache.write_text("")
    found, warnings = list_models(tmp_path / "home")
    assert found == [] and len(warnings) == 1
    assert warnings[0].startswith("The Hugging Face cache cannot be read: ")
    assert list_models(tmp_path / ("x" * 300))[0] == []  # a home that cannot be looked into


def test_what_is_there_is_named_as_serve_takes_it(cache: Path, tmp_path: Path) -> None:
    save_tiny_model("llama", snapshot(cache, "org/tiny"))
    save_tiny_model("llama", snapshot(cache, "org/tiny", OTHER, "v2"))
    ggufs = snapshot(cache, "org/ggufs")
    save_tiny_gguf(ggufs / "t-F32.gguf")
    (ggufs / "t-Q4_K_M.gguf").write_bytes(b"GGUF")
    save_tiny_model("llama", tmp_path / "home/models/t-0123")
    (tmp_path / "home/models/.t-4567.unfinished-x").mkdir()
    found = listed(tmp_path)
    converted = str(tmp_path / "home/models/t-0123")
    assert set(found) == {"org/tiny", "org/tiny@v2", "org/ggufs:F32", "org/ggufs:Q4_K_M", converted}
    assert found["org/tiny"].stored == found[converted].stored == "safetensors F32"
    assert found["org/tiny"].reason is found[converted].reason is None
    weights = (cache / f"models--org--tiny/snapshots/{MAIN}/model.safetensors").stat().st_size
    assert weights < found["org/tiny"].size_bytes < weights + 1_000_000
    assert (found["org/ggufs:F32"].stored, found["org/ggufs:F32"].reason) == ("GGUF F32", None)
    assert "cannot be read" in (found["org/ggufs:Q4_K_M"].reason or "")


def test_what_cannot_be_served_says_why(cache: Path, tmp_path: Path) -> None:
    pickled = save_tiny_model("llama", snapshot(cache, "org/pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (snapshot(cache, "org/xlstm") / "config.json").write_text('{"model_type": "xlstm"}')
    found = listed(tmp_path)
    assert "only pytorch_model.bin" in (found["org/pickled"].reason or "")
    assert found["org/xlstm"].reason


def test_a_converted_model_that_is_closed_says_so_beside_the_others(cache: Path, tmp_path: Path) -> None:
    closed = tmp_path / "home" / "models" / "closed"
    closed.mkdir(parents=True)
    for file in ("gguf.json", "modules.json"):
        (closed / file).symlink_to("x" * 300)
    save_tiny_model("llama", closed.with_name("tiny"))
    found, _ = list_models(tmp_path / "home")
    reasons = {Path(each.name).name: each.reason for each in found}
    assert reasons == {"tiny": None, "closed": f"{closed} cannot be read: File name too long."}


def test_models_that_embed_or_score_texts_can_be_served(cache: Path, tmp_path: Path) -> None:
    save_embedder(snapshot(cache, "org/vectors"))
    save_cross_encoder(snapshot(cache, "org/scores"))
    save_cross_encoder(snapshot(cache, "org/three"), num_labels=3)
    found = listed(tmp_path)
    assert (found["org/vectors"].reason, found["org/vectors"].stored) == (None, "safetensors F32")
    assert found["org/scores"].reason is None
    assert "3 scores" in (found["org/three"].reason or "")


def test_the_last_used_come_first_and_looking_is_no_use(cache: Path, tmp_path: Path) -> None:
    for name, when in (("old", 1_000_000_000), ("new", 1_100_000_000)):
        directory = save_tiny_model("llama", snapshot(cache, f"org/{name}"))
        for path in directory.iterdir():
            os.utime(path, (when, when))
    for _ in range(2):
        found, _ = list_models(tmp_path / "home")
        assert [(each.name, each.last_used) for each in found] == [
            ("org/new", 1_100_000_000),
            ("org/old", 1_000_000_000),
        ]


def test_a_damaged_repo_is_told_beside_the_others(cache: Path, tmp_path: Path) -> None:
    save_tiny_model("llama", snapshot(cache, "org/tiny"))
    (cache / "models--org--bad").mkdir()
    found, warnings = list_models(tmp_path / "home")
    assert [each.name for each in found] == ["org/tiny"]
    assert len(warnings) == 1 and "org--bad" in warnings[0]
