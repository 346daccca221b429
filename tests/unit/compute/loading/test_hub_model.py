"""A model comes from a hub: whole, checked, continued where a fetch ended, and nothing that is not read."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest

from config import ModelSettings
from engine.compute.embedding.embedder import load_embedder
from engine.compute.embedding.source import is_embedding_model, resolve_embedding_model
from engine.compute.loading.locate import find_model
from engine.compute.loading.model_source import pull_model, resolve_model
from engine.errors import StartRefused, UnsupportedModel
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.tiny_embedders import save_embedder
from tests.support.tiny_gguf import save_tiny_gguf, split_gguf
from tests.support.tiny_models import save_tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path) -> Iterator[FakeHub]:
    """A hub with a tiny model, as HF_ENDPOINT would name it, and an empty cache."""
    with fake_hub() as hub:
        monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_constants, "DOWNLOAD_CHUNK_SIZE", 1024)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        hub.add("org/tiny", tiny)
        yield hub


def resolve(tmp_path: Path, name: str, revision: str | None = None) -> Path:
    return resolve_model(ModelSettings(model=name, revision=revision), tmp_path / "home")


def refusal(tmp_path: Path, name: str, revision: str | None = None) -> str:
    with pytest.raises(StartRefused) as refused:
        resolve(tmp_path, name, revision)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def begun(tmp_path: Path, content: bytes) -> Path:
    """Where the part of a file is kept that came already."""
    digest = hashlib.sha256(content).hexdigest()
    return tmp_path / "cache/models--org--tiny/blobs" / f"{digest}.incomplete"


def test_only_what_serving_reads_is_fetched_and_only_once(hub: FakeHub, tmp_path: Path, tiny: Path) -> None:
    hub.repos["org/tiny"] |= {"pytorch_model.bin": b"x", "evil.py": b"x", "onnx/m.onnx": b"x", "m.gguf": b"x"}
    directory = resolve(tmp_path, "org/tiny")
    assert sorted(path.name for path in directory.iterdir()) == sorted(path.name for path in tiny.iterdir())
    assert (directory / WEIGHTS).read_bytes() == (tiny / WEIGHTS).read_bytes()
    hub.asked.clear()
    assert resolve(tmp_path, "org/tiny") == directory
    assert hub.fetched() == []


def test_an_embedding_model_comes_with_its_modules_and_no_other_format(hub: FakeHub, tmp_path: Path) -> None:
    made = save_embedder(tmp_path / "made", heads=("Dense", "Normalize"))
    hub.add("org/embedder", made)
    others = {"onnx/model.onnx": b"x", "openvino/config.json": b"x", "pytorch_model.bin": b"x"}
    hub.repos["org/embedder"] |= others
    settings = ModelSettings(model="org/embedder")
    assert not is_embedding_model(settings, may_fetch=False)
    assert is_embedding_model(settings) and not is_embedding_model(ModelSettings(model="org/tiny"))
    assert sorted(set(hub.fetched())) == ["config.json", "modules.json"]
    directory = resolve_embedding_model(settings)
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert not names & set(others)
    assert {"1_Pooling/config.json", "2_Dense/model.safetensors", WEIGHTS, "tokenizer.json"} <= names
    assert is_embedding_model(settings, may_fetch=False)
    assert load_embedder(directory, ModelSettings(device="cpu")).info.dimensions == 16
    hub.asked.clear()
    assert resolve_embedding_model(settings) == directory and hub.fetched() == []


@pytest.mark.by_default("bert")
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_an_embedding_model_is_pulled_whole(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    hub.add("org/embedder", save_embedder(tmp_path / "made", kind, heads=("Dense", "Normalize")))
    directory = pull_model("org/embedder", None)
    hub.asked.clear()
    assert resolve_embedding_model(ModelSettings(model="org/embedder")) == directory
    assert hub.fetched() == []


@pytest.mark.parametrize("name", ["org/nowhere", "org/tiny:F32", "./nowhere", "nowhere.gguf"])
def test_an_embedding_model_that_is_nowhere(hub: FakeHub, name: str) -> None:
    assert not is_embedding_model(ModelSettings(model=name))
    with pytest.raises(StartRefused):
        resolve_embedding_model(ModelSettings(model=name))


def test_one_gguf_file_is_fetched_and_converted(hub: FakeHub, tmp_path: Path) -> None:
    content = save_tiny_gguf(tmp_path / "made.gguf").read_bytes()
    hub.repos["org/gguf"] = {"t-F32.gguf": content, "t-Q8_0.gguf": b"x", "config.json": b"{}"}
    settings = ModelSettings(model="org/gguf:F32", revision="main")
    assert find_model(settings, tmp_path / "home").pending == "downloads it from the Hugging Face hub"
    directory = resolve_model(settings, tmp_path / "home")
    assert directory.parent == tmp_path / "home/models"
    assert hub.fetched() == ["t-F32.gguf"]
    found = find_model(settings, tmp_path / "home")
    assert (found.directory, found.pending) == (directory, None)


def test_all_parts_of_a_split_file_are_fetched_and_served(hub: FakeHub, tmp_path: Path) -> None:
    parts = split_gguf(save_tiny_gguf(tmp_path / "t-F32.gguf"), 2)
    hub.repos["org/split"] = {"t-Q8_0.gguf": b"x"} | {part.name: part.read_bytes() for part in parts}
    settings, home = ModelSettings(model="org/split:F32"), tmp_path / "home"
    assert find_model(settings, home).pending == "downloads it from the Hugging Face hub"
    directory = resolve_model(settings, home)
    assert sorted(set(hub.fetched())) == [part.name for part in parts]
    found = find_model(settings, home)
    assert (found.directory, found.pending) == (directory, None)
    del hub.repos["org/split"][parts[1].name]
    hub.repos["org/part"] = hub.repos["org/split"]
    with pytest.raises(StartRefused, match="org/part:F32 is incomplete: t-F32-00001-of-00002"):
        resolve_model(ModelSettings(model="org/part:F32"), home)


def test_a_cut_connection_is_continued(hub: FakeHub, tmp_path: Path, tiny: Path) -> None:
    hub.cuts[WEIGHTS] = [5_000, 6_000]
    directory = resolve(tmp_path, "org/tiny")
    assert (directory / WEIGHTS).read_bytes() == (tiny / WEIGHTS).read_bytes()
    assert hub.ranges(WEIGHTS) == [None, "bytes=4096-", "bytes=9216-"]


def test_what_came_before_the_end_is_kept_for_the_next_try(hub: FakeHub, tmp_path: Path, tiny: Path) -> None:
    hub.cuts[WEIGHTS] = [5_000, *[0] * 10]
    assert "was lost; what came of org/tiny is kept" in refusal(tmp_path, "org/tiny")
    assert begun(tmp_path, (tiny / WEIGHTS).read_bytes()).stat().st_size == 4096
    hub.cuts.clear()
    hub.asked.clear()
    directory = resolve(tmp_path, "org/tiny")
    assert hub.ranges(WEIGHTS) == ["bytes=4096-"]
    assert (directory / WEIGHTS).read_bytes() == (tiny / WEIGHTS).read_bytes()


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_that_is_not_what_the_hub_names_is_deleted(hub: FakeHub, tmp_path: Path, name: str) -> None:
    right = hub.tree("org/tiny")
    hub.tree = lambda repo: right  # type: ignore[method-assign]
    content = hub.repos["org/tiny"][name]
    hub.repos["org/tiny"][name] = bytes(len(content))
    said = refusal(tmp_path, "org/tiny")
    assert f"{name} of org/tiny came damaged: its digest is " in said
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    hub.repos["org/tiny"][name] = content
    assert (resolve(tmp_path, "org/tiny") / name).read_bytes() == content


def test_weights_that_cannot_be_served_are_never_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/xlstm"] = {"config.json": b'{"model_type": "xlstm"}', WEIGHTS: b"x"}
    with pytest.raises(UnsupportedModel, match="xLSTMForCausalLM"):
        resolve(tmp_path, "org/xlstm")
    assert WEIGHTS not in hub.fetched()


def test_what_the_hub_refuses_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    assert "no Hugging Face repo org/none" in refusal(tmp_path, "org/none")
    assert "no Hugging Face repo org/tiny at v9" in refusal(tmp_path, "org/tiny", "v9")
    hub.gated.add("org/tiny")
    page = f"{hub.url}/org/tiny"
    assert refusal(tmp_path, "org/tiny") == f"org/tiny is gated: accept its terms at {page} and set HF_TOKEN."
    hub.forbidden.add("org/tiny")
    assert "refuses access with 403: set HF_TOKEN" in refusal(tmp_path, "org/tiny")


def test_without_the_hub_the_cache_is_served_and_what_lacks_is_said(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = resolve(tmp_path, "org/tiny")
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert resolve(tmp_path, "org/tiny") == directory
    for name in ("org/other", "org/tiny:Q4_0"):
        said = refusal(tmp_path, name)
        assert said.startswith(f"{name} is neither a directory nor in the local cache")
        assert "http://127.0.0.1:9 cannot be reached" in said
    (directory / WEIGHTS).unlink()
    assert "is neither a directory nor in the local cache" in refusal(tmp_path, "org/tiny")


def test_a_full_disk_is_said_before_anything_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "has 0 MiB free" in refusal(tmp_path, "org/tiny")
    assert hub.fetched() == []
