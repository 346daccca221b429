"""A model is sampled as its makers advise where a request says nothing, by what a request could say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.compute.loading.default_sampling import read_default_sampling
from engine.errors import StartRefused


def advised(directory: Path, **fields: Any) -> dict[str, float]:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return read_default_sampling(directory, "org/some")


def test_the_built_in_model_has_a_low_temperature(tmp_path: Path) -> None:
    assert read_default_sampling(tmp_path, "SmolLM2-135M-Instruct") == {"temperature": 0.2, "top_p": 0.9}
    assert read_default_sampling(tmp_path, "./SmolLM2-135M-Instruct") == {}


def test_what_generation_config_says_is_taken(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    assert advised(tmp_path, **given, do_sample=True, max_new_tokens=5, eos_token_id=2) == given


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": "0.6"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": float("nan")},
        {"repetition_penalty": None},
    ],
)
def test_what_no_request_could_say_is_left_out(field: dict[str, Any], tmp_path: Path) -> None:
    assert advised(tmp_path, **field) == {}


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(StartRefused, match=r"generation_config\.json cannot be read"):
        read_default_sampling(tmp_path, "org/some")
