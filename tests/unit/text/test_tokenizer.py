from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.errors import InvalidRequest, StartRefused
from engine.text.tokenizer import Tokenizer
from tests.unit.text.builders import BACKENDS, BOS, CHATML, EOS, byte_level, id_of, load, save, word_level

TEXTS = ["", "hello world", "naïve café\n\n  x", "你好 🦀🙂", "e\u0301 👩‍👩‍👧", "\x00\x7f\u200b\ufffd"]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_encoding_loses_nothing(kind: str) -> None:
    tokenizer = load(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", BACKENDS)
def test_encodes_and_decodes_as_transformers_does(kind: str, tmp_path: Path) -> None:
    tokenizer = load(kind)
    reference = AutoTokenizer.from_pretrained(save(BACKENDS[kind](), tmp_path))
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
            decoded = tokenizer.decode(ids, skip_special_tokens=special)
            assert decoded == reference.decode(ids, skip_special_tokens=special)


def test_special_tokens_are_added_only_when_asked_for() -> None:
    tokenizer = load("byte_level")
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id, *plain]


def test_text_that_spells_a_special_token_becomes_it() -> None:
    tokenizer = load("byte_level")
    ids = tokenizer.encode(f"a{EOS}b", add_special_tokens=False)
    assert ids[1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{EOS}b"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "\ud83e \udd80"])
def test_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        load("byte_level").encode(text)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        load("byte_level").render_chat([{"role": "user", "content": text}])
    assert caught.value.param == "messages"


def test_single_tokens_can_be_looked_up() -> None:
    tokenizer = load("byte_level")
    first, *_ = tokenizer.encode("🙂", add_special_tokens=False)
    assert tokenizer.eos_token_id is not None
    assert (tokenizer.token_text(tokenizer.eos_token_id), tokenizer.token_bytes(tokenizer.eos_token_id)) == (
        EOS,
        EOS.encode(),
    )
    assert "🙂".encode().startswith(tokenizer.token_bytes(first) or b"?")
    for unknown in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(unknown) is None
        assert tokenizer.token_text(unknown) == ""
    (world,) = tokenizer.encode(" world", add_special_tokens=False)
    assert tokenizer.token_text(world) == " world"


def test_a_part_of_a_character_reads_as_a_replacement() -> None:
    tokenizer = load("llama")
    lead = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(lead) == "\ufffd"


def test_special_ids_and_vocabulary_size() -> None:
    tokenizer = load("byte_level")
    backend = byte_level()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        id_of(backend, BOS),
        id_of(backend, EOS),
    )
    assert tokenizer.pad_token_id is None
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_no_prompt_that_fits_is_longer_than_the_character_limit() -> None:
    tokenizer = load("byte_level")
    longest = max((tokenizer.token_text(i) for i in range(tokenizer.vocab_size)), key=len)
    limit = tokenizer.char_limit(100)
    assert limit == 100 * len(longest)
    assert len(tokenizer.encode(longest * 101, add_special_tokens=False)) > 100
    assert len(longest * 101) > limit >= len(longest * 100)


def test_truncation_and_padding_in_the_files_are_not_applied(tmp_path: Path) -> None:
    save(word_level(), tmp_path)
    path = tmp_path / "tokenizer.json"
    description = json.loads(path.read_text())
    description["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    description["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    path.write_text(json.dumps(description))
    assert len(Tokenizer(tmp_path).encode("red green blue", add_special_tokens=False)) == 3


def test_many_threads_get_the_same_answers() -> None:
    tokenizer = load("byte_level")
    text = "hello world 🦀 " * 50
    expected = tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.render_chat(messages)

    def work(_: int) -> bool:
        same = tokenizer.encode(text) == expected and tokenizer.render_chat(messages) == chat
        return same and tokenizer.decode(expected, skip_special_tokens=True) == text

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(100)))


def test_a_directory_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(StartRefused, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Nope"}}'])
def test_an_unreadable_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    save(word_level(), tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartRefused, match="cannot be loaded") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_brings_its_own_code_is_refused(tmp_path: Path) -> None:
    save(word_level(), tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(ran)!r}, 'w')\nclass CustomTokenizer: ...\n")
    path = tmp_path / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config |= {
        "tokenizer_class": "CustomTokenizer",
        "auto_map": {"AutoTokenizer": [None, "custom.CustomTokenizer"]},
    }
    path.write_text(json.dumps(config))
    with pytest.raises(StartRefused, match="cannot be loaded"):
        Tokenizer(tmp_path)
    assert not ran.exists()


def test_an_operators_template_replaces_the_models_own(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, chat_template="own: {{ messages[0].content }}")
    messages = [{"role": "user", "content": "hello"}]
    assert Tokenizer(tmp_path).render_chat_text(messages) == "own: hello"
    replaced = Tokenizer(tmp_path, chat_template="file: {{ messages[0].content }}")
    assert replaced.render_chat_text(messages) == "file: hello"


def test_chat_is_rendered_and_encoded_without_added_special_tokens() -> None:
    tokenizer = load("byte_level")
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.render_chat_text(messages)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.render_chat(messages)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.bos_token_id not in ids
    assert tokenizer.token_text(ids[0]) == "<|im_start|>"


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_one_long_word_does_not_take_quadratic_time(kind: str) -> None:
    """Merging a word of this length must take well under a second; quadratic merging would take an hour."""
    text = "a" * 300_000
    ids = load(kind).encode(text, add_special_tokens=False)
    assert load(kind).decode(ids, skip_special_tokens=False) == text


def test_the_fixture_has_a_template() -> None:
    assert load("byte_level").has_chat_template
    assert "im_start" in CHATML


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = load("byte_level")
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(tokenizer.encode, "a b " * 100_000)
        num_turns = 0
        while not encoding.done():
            num_turns += 1
            time.sleep(0)  # offers the interpreter to whoever wants it
    assert num_turns > 100
