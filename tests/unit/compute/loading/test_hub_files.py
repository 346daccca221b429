"""Which files of a repo are read to serve it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.compute.loading.hub_files import HubName, gguf_name, read_hub_name, text_files, weight_names
from engine.errors import StartRefused

GGUFS = ["README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "m-IQ4_XS.gguf", "mmproj-m-f16.gguf"]


@pytest.mark.parametrize(
    ("name", "repo", "pick"),
    [
        ("org/m", "org/m", None),
        ("gpt2", "gpt2", None),
        ("org/m:Q4_K_M", "org/m", "Q4_K_M"),
        ("org/m:sub/m-q8.gguf", "org/m", "sub/m-q8.gguf"),
    ],
)
def test_a_name_is_a_repo_and_perhaps_one_of_its_files(name: str, repo: str, pick: str | None) -> None:
    found = read_hub_name(name)
    assert found == HubName(repo, pick)
    assert str(found) == name


@pytest.mark.parametrize("name", ["a/b/c", "../up", "org/m:", "./m", "org/na me", "-x", "http://x/y"])
def test_what_is_no_repo_is_none(name: str) -> None:
    assert read_hub_name(name) is None


def test_only_texts_at_the_top_are_read_and_no_code() -> None:
    files = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
        "merges.txt", "model.safetensors.index.json", "modeling_evil.py", "pytorch_model.bin", "README.md",
        "onnx/config.json", "original/params.json", "training_args.bin", "x.pkl",
        "model.safetensors.index.fp16.json", "consolidated.safetensors.index.json",
    ]  # fmt: skip
    assert text_files(files) == files[:7]


def test_safetensors_are_read_and_nothing_beside_them(tmp_path: Path) -> None:
    name = HubName("org/m")
    files = ["model.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "m.Q8_0.gguf"]
    assert gguf_name(name, files) is None
    assert weight_names(name, files, tmp_path) == ["model.safetensors"]
    shards = ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}})
    )
    assert weight_names(name, [*shards, "consolidated.safetensors"], tmp_path) == shards


def test_pickled_weights_are_refused_before_they_are_fetched(tmp_path: Path) -> None:
    with pytest.raises(
        StartRefused, match=r"no safetensors weights \(only pytorch_model\.bin, which could run"
    ):
        weight_names(HubName("org/m"), ["pytorch_model.bin", "sub/x.bin"], tmp_path)


@pytest.mark.parametrize(
    ("pick", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "m.Q8_0.gguf"),
        ("m.Q8_0.gguf", "m.Q8_0.gguf"),
        ("IQ4_XS", "m-IQ4_XS.gguf"),
    ],
)
def test_a_quantization_or_a_file_is_picked(pick: str, file: str) -> None:
    assert gguf_name(HubName("org/m", pick), GGUFS) == file


@pytest.mark.parametrize("pick", [None, "Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"])
def test_of_a_split_file_the_first_part_is_picked(pick: str | None) -> None:
    files = [f"Q8_0/m-Q8_0-0000{part}-of-00002.gguf" for part in (2, 1)]
    assert gguf_name(HubName("org/m", pick), files) == files[1]
    more = [*files, *(f"m-Q4_0-0000{part}-of-00003.gguf" for part in (1, 2, 3))]
    with pytest.raises(StartRefused, match=r"It has Q8_0, Q4_0\.$|It has Q4_0, Q8_0\.$"):
        gguf_name(HubName("org/m"), more)


def test_the_only_gguf_file_needs_no_name() -> None:
    assert gguf_name(HubName("org/m"), ["m-Q4_0.gguf", "mmproj-f16.gguf"]) == "m-Q4_0.gguf"


@pytest.mark.parametrize(
    ("pick", "files", "said"),
    [
        (None, GGUFS, "org/m has several GGUF files: name one, as in org/m:Q4_K_M. It has "),
        ("Q4_K", GGUFS, "org/m has no GGUF file Q4_K. It has IQ4_XS, Q4_K_M, Q4_K_S, Q8_0."),
        ("Q4_XS", GGUFS, "org/m has no GGUF file Q4_XS."),
        ("Q4_0", ["config.json", "model.safetensors"], "org/m has no GGUF files; without :Q4_0 "),
        (
            "Q4_0",
            ["a-Q4_0.gguf", "b-Q4_0.gguf"],
            "could be several files: name one of a-Q4_0.gguf, b-Q4_0.gguf",
        ),
    ],
)
def test_what_cannot_be_picked_is_said_with_what_there_is(
    pick: str | None, files: list[str], said: str
) -> None:
    with pytest.raises(StartRefused) as refused:
        gguf_name(HubName("org/m", pick), files)
    assert said in str(refused.value) and "\n" not in str(refused.value)
