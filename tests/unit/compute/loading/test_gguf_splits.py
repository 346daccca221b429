"""Texts of a GGUF file are split by the rule that it names, as llama.cpp has them, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.compute.loading.gguf_convert import convert_gguf, prepare_gguf
from engine.errors import UnsupportedModel
from tests.support.tiny_gguf import save_tiny_gguf

TEXT = "I'LL pay 12345.\n\n$ab x\u4e2d\u6587y"
QWEN = ["I", "'LL", " pay", " ", *"12345", ".\n\n", "$ab", " x\u4e2d\u6587y"]


def save_with_rule(path: Path, rule: str) -> Path:
    def change(writer: Any) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = rule

    return save_tiny_gguf(path, extra=change)


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("qwen2", QWEN),
        ("stablelm2", QWEN),
        ("chatglm-bpe", ["I", "'LL", " pay", " ", "123", "45", ".\n\n", "$ab", " x\u4e2d\u6587y"]),
        (
            "deepseek-coder",
            ["I", "'", "LL", " pay", " ", *"12345", ".", "\n", "\n", "$", "ab", " x", "\u4e2d\u6587", "y"],
        ),
        (
            "falcon",
            ["I", "'", "LL", " pay", " ", "123", "45", ".", "\n\n", "$", "ab", " x\u4e2d\u6587y"],
        ),
        (
            "minerva-7b",
            ["I", "'", "LL", " pay", " ", *"12345", ".", "\n", "\n", "$", "ab", " x\u4e2d\u6587y"],
        ),
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", ".", "\n", "\n", "$", "ab", " x\u4e2d\u6587y"]),
    ],
)
def test_a_rule_that_is_known(tmp_path: Path, rule: str, pieces: list[str]) -> None:
    (tmp_path / "out").mkdir()
    prepare_gguf(save_with_rule(tmp_path / "model.gguf", rule), tmp_path / "out")
    backend = AutoTokenizer.from_pretrained(tmp_path / "out").backend_tokenizer
    found = [TEXT[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert found == pieces


@pytest.mark.parametrize("rule", ["deepseek-llm", "no-such-rule"])
def test_a_rule_that_is_not_known_is_refused(tmp_path: Path, rule: str) -> None:
    path = save_with_rule(tmp_path / "model.gguf", rule)
    for prepare in (convert_gguf, prepare_gguf):
        with pytest.raises(UnsupportedModel, match=f"by the rule '{rule}', which is not known"):
            prepare(path, tmp_path / prepare.__name__)
