"""Nothing in a model directory runs, and nothing incomplete or damaged is taken for a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from config import ModelSettings
from engine.compute.embedding.folder import is_embedding_folder
from engine.compute.loading import model_files
from engine.compute.loading.loader import load_model
from engine.compute.loading.model_files import check_model_files
from engine.compute.loading.support import read_architecture
from engine.errors import StartRefused, UnsupportedModel
from tests.support.tiny_models import save_tiny_model, tiny_model

FLOAT32 = ModelSettings(dtype="float32", device="cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "llama")


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def ship_code(directory: Path) -> Path:
    """Put modules beside the weights that would leave a mark if anything imported them; returns the mark."""
    mark = directory / "was_here"
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    auto_map = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
        "AutoTokenizer": ["tokenization_evil.EvilTokenizer", None],
    }
    edit_json(directory / "config.json", auto_map=auto_map)
    edit_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": auto_map["AutoTokenizer"]})
    return mark


def test_an_architecture_that_is_only_code_is_refused_by_name(llama: Path) -> None:
    mark = ship_code(llama)
    edit_json(llama / "config.json", model_type="evil")
    with pytest.raises(
        UnsupportedModel, match=r"'evil' needs Python code .*\(auto_map\), which is never run"
    ):
        load_model(llama, FLOAT32)
    assert not mark.exists()


def test_a_model_that_is_known_by_another_name_is_loaded_as_that(tmp_path: Path) -> None:
    directory = save_tiny_model("qwen2", tmp_path / "model")
    mark = ship_code(directory)
    edit_json(directory / "config.json", model_type="mimo", architectures=["MiMoForCausalLM"])
    loaded = load_model(directory, FLOAT32)
    assert type(loaded.model) is Qwen2ForCausalLM
    assert not mark.exists()


def test_code_beside_a_known_architecture_is_never_looked_at(llama: Path) -> None:
    mark = ship_code(llama)
    loaded = load_model(llama, FLOAT32)
    assert type(loaded.model).__module__.startswith("transformers.")
    assert not mark.exists()


def test_a_tokenizer_that_is_only_code_is_refused(llama: Path) -> None:
    mark = ship_code(llama)
    (llama / "tokenizer.json").unlink()
    with pytest.raises(StartRefused, match="the tokenizer needs Python code"):
        check_model_files(llama)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickled_weights_are_refused(llama: Path, name: str) -> None:
    (llama / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), llama / name)
    with pytest.raises(StartRefused, match=f"no safetensors weights .only {name}"):
        load_model(llama, FLOAT32)


def test_pickled_weights_beside_safetensors_are_left_alone(llama: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"never read")
    assert load_model(llama, FLOAT32).vocab_size == 512


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def claim_huge_header(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def overlap(path: Path) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"] = [0, 1 << 40]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, cut_header, claim_huge_header, overlap, empty])
def test_damaged_weights_are_one_clear_line(llama: Path, damage: Callable[[Path], None]) -> None:
    damage(llama / "model.safetensors")
    with pytest.raises(StartRefused, match=r"model\.safetensors is damaged or incomplete: ") as refused:
        load_model(llama, FLOAT32)
    assert "\n" not in str(refused.value)


def test_weights_that_are_closed_to_this_user_are_not_called_damaged(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To root nothing is closed: the system and the library say here what they would say to others."""
    open_path = Path.open

    def refuse(path: Path, mode: str = "r", **others: Any) -> IO[Any]:
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return open_path(path, mode, **others)

    def find_nothing(path: Path, framework: str) -> None:
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(model_files, "safe_open", find_nothing)
    with pytest.raises(StartRefused, match=r"model\.safetensors cannot be read: Permission denied\.$"):
        check_model_files(llama)


def test_sharded_weights_are_read_and_a_missing_shard_is_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(llama, max_shard_size="100KB")
    assert load_model(llama, FLOAT32).vocab_size == 512
    shards = sorted(llama.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(StartRefused, match=shards[1].name):
        load_model(llama, FLOAT32)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "not json"])
def test_an_index_without_files_is_refused(llama: Path, index: str) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartRefused, match=r"model\.safetensors\.index\.json"):
        load_model(llama, FLOAT32)


@pytest.mark.parametrize("content", ["", "[]", "nonsense", "[" * 100_000, "\ud800"])
def test_a_configuration_that_cannot_be_read_is_refused(llama: Path, content: str) -> None:
    (llama / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(StartRefused, match=r"config\.json (cannot be read|does not hold)") as refused:
        load_model(llama, FLOAT32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model_type", [], r"model_type is \[\], no text"),
        ("architectures", -1, "architectures is -1, no list of texts"),
        ("architectures", [None], r"architectures is \[None\], no list of texts"),
        ("text_config", 0, "is not understood"),
    ],
)
def test_a_configuration_of_other_types_is_refused(
    llama: Path, name: str, value: object, reason: str
) -> None:
    edit_json(llama / "config.json", **{name: value})
    with pytest.raises(StartRefused, match=rf"config\.json:? {reason}"):
        read_architecture(llama)
    if name == "architectures":
        with pytest.raises(StartRefused, match=reason):
            is_embedding_folder(llama)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match=r"it has no config\.json"):
        load_model(tmp_path, FLOAT32)


def test_an_adapter_is_refused(llama: Path) -> None:
    (llama / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(StartRefused, match="holds an adapter"):
        load_model(llama, FLOAT32)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "pytorch_model.bin", "a\0b", 3])
def test_an_index_that_leads_anywhere_else_is_refused(llama: Path, name: object) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(StartRefused, match=r"no \.safetensors file in it"):
        load_model(llama, FLOAT32)


@pytest.mark.parametrize("num_layers", [-1, 0, 22, 2**40, 2**70])
def test_a_number_of_layers_that_no_file_fills_is_refused_at_once(llama: Path, num_layers: int) -> None:
    edit_json(llama / "config.json", num_hidden_layers=num_layers)
    with pytest.raises(StartRefused, match=f"asks for {num_layers} layers .* 21 tensors"):
        load_model(llama, FLOAT32)


@pytest.mark.parametrize("num_positions", [-1, 0])
def test_a_context_of_nothing_is_refused(llama: Path, num_positions: int) -> None:
    edit_json(llama / "config.json", max_position_embeddings=num_positions)
    with pytest.raises(StartRefused, match=f"own context is {num_positions} tokens"):
        load_model(llama, FLOAT32)
