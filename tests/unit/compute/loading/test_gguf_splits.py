"""Texts of a GGUF file are split by the rule that it names, as llama.cpp has them, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.compute.loading.gguf_convert import convert_gguf, prepare_gguf
from engine.errors import UnsupportedModel
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_gguf import save_tiny_gguf
from tests.support.tiny_models import VOCAB_SIZE

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


@pytest.mark.parametrize(("flag", "first"), [(None, "\u2581Hi"), (True, "\u2581Hi"), (False, "Hi")])
def test_a_text_begins_with_a_space_unless_the_file_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: bool | None, first: str
) -> None:
    bytes_of_it = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_of_it, "\u2581", "H", "i", "\u2581H", "\u2581Hi", "Hi"]
    words += [f"w{number}" for number in range(VOCAB_SIZE - len(words))]

    def add_tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (VOCAB_SIZE - 259)])
        writer.add_token_scores([-float(place) for place in range(VOCAB_SIZE)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if flag is not None:
            writer.add_add_space_prefix(flag)

    monkeypatch.setattr("tests.support.tiny_gguf.add_tokenizer", add_tokenizer)
    (tmp_path / "out").mkdir()
    prepare_gguf(save_tiny_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    tokenizer = Tokenizer(tmp_path / "out")
    token_ids = tokenizer.encode("Hi Hi", add_special_tokens=False)
    assert [tokenizer.token_name(each) for each in token_ids] == [first, "\u2581Hi"]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "Hi Hi"
    assert tokenizer.decode(token_ids[1:], skip_special_tokens=True) == ("Hi" if first != "Hi" else " Hi")
