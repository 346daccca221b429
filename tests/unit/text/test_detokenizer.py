from __future__ import annotations

import pytest

from engine.text.detokenizer import Detokenizer, TextDelta
from engine.text.tokenizer import Tokenizer
from tests.unit.text.builders import BACKENDS, load


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    single = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [single[bytes([byte])] for byte in data]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_split_character_is_shown_once_complete() -> None:
    tokenizer = load("byte_level")
    detokenizer = Detokenizer(tokenizer, [])
    shown = [detokenizer.push([token_id]).text for token_id in byte_ids(tokenizer, "a🦀é".encode())]
    assert shown == ["a", "", "", "", "🦀", "", "é"]
    assert detokenizer.flush() == TextDelta("", None, 0)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_bytes_that_never_become_a_character_end_as_replacements(kind: str) -> None:
    tokenizer = load(kind)
    detokenizer = Detokenizer(tokenizer, ids_of(tokenizer, "hello"))
    crab = "🦀".encode()
    assert detokenizer.push(byte_ids(tokenizer, crab[:3])).text == ""
    assert detokenizer.flush().text == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_an_ill_formed_byte_takes_nothing_back(kind: str) -> None:
    """The library's own stream raises here for byte fallback, or keeps the text forever."""
    tokenizer = load(kind)
    detokenizer = Detokenizer(tokenizer, ids_of(tokenizer, "hello"))
    shown = [detokenizer.push([token_id]).text for token_id in byte_ids(tokenizer, "你".encode() + b"\xffa")]
    assert shown == ["", "", "你", "\ufffd", "a"]


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_a_reply_keeps_the_space_between_prompt_and_reply(kind: str) -> None:
    tokenizer = load(kind)
    prompt, whole = ids_of(tokenizer, "hello"), ids_of(tokenizer, "hello world")
    assert whole[: len(prompt)] == prompt
    assert Detokenizer(tokenizer, prompt).push(whole[len(prompt) :]).text == " world"


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_a_reply_to_a_prompt_without_text_starts_without_the_space(kind: str) -> None:
    tokenizer = load(kind)
    prompt = ids_of(tokenizer, "<s>")[:1]
    reply = ids_of(tokenizer, "hello world")
    detokenizer = Detokenizer(tokenizer, prompt)
    assert detokenizer.push(prompt).text == ""  # a special token does not open the text
    assert "".join(detokenizer.push([token_id]).text for token_id in reply) == "hello world"


def test_special_tokens_with_text_open_the_text_when_they_are_shown() -> None:
    tokenizer = load("llama")
    prompt = ids_of(tokenizer, "<s>")[:1]
    reply = ids_of(tokenizer, "hello")
    assert Detokenizer(tokenizer, prompt, shown_special_ids=None).push(reply).text == " hello"
    assert Detokenizer(tokenizer, prompt, shown_special_ids=frozenset()).push(reply).text == "hello"


def test_a_character_that_the_prompt_leaves_incomplete_comes_with_the_reply() -> None:
    tokenizer = load("byte_level")
    tokens = byte_ids(tokenizer, "x🦀!".encode())
    detokenizer = Detokenizer(tokenizer, tokens[:3])
    assert [detokenizer.push([token_id]).text for token_id in tokens[3:]] == ["", "🦀", "!"]


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    tokenizer = load("byte_level")
    detokenizer = Detokenizer(tokenizer, [tokenizer.vocab_size + 5])
    assert detokenizer.push([10**6, *ids_of(tokenizer, "hello"), tokenizer.vocab_size]).text == "hello"


@pytest.mark.parametrize("kind", BACKENDS)
def test_pushing_nothing_shows_nothing(kind: str) -> None:
    for stop in ((), ("x",)):
        detokenizer = Detokenizer(load(kind), [], stop=stop)
        assert detokenizer.push([]) == TextDelta("", None, 0)
        assert detokenizer.flush() == TextDelta("", None, 0)


def test_a_stop_string_is_cut_and_the_tokens_after_it_are_not_counted() -> None:
    tokenizer = load("byte_level")
    tokens = byte_ids(tokenizer, b"one END two")
    assert Detokenizer(tokenizer, [], stop=["END"]).push(tokens) == TextDelta("one ", "END", 7)
    kept = Detokenizer(tokenizer, [], stop=["END"], include_stop=True).push(tokens)
    assert kept == TextDelta("one END", "END", 7)


def test_text_after_the_stop_string_in_its_token_is_dropped() -> None:
    tokenizer = load("byte_level")
    (token,) = ids_of(tokenizer, "two words")
    assert Detokenizer(tokenizer, [], stop=["o w"]).push([token]) == TextDelta("tw", "o w", 1)
    kept = Detokenizer(tokenizer, [], stop=["o w"], include_stop=True).push([token])
    assert kept == TextDelta("two w", "o w", 1)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    tokenizer = load("byte_level")
    detokenizer = Detokenizer(tokenizer, [], stop=["</end>"])
    shown = [detokenizer.push([token_id]).text for token_id in byte_ids(tokenizer, b"a</b></")]
    assert shown == ["a", "", "", "</b", ">", "", ""]
    assert detokenizer.flush() == TextDelta("</", None, 0)
    assert detokenizer.flush() == TextDelta("", None, 0)


def test_a_stop_string_that_spans_a_split_character() -> None:
    tokenizer = load("llama")
    prompt = ids_of(tokenizer, "hello")
    detokenizer = Detokenizer(tokenizer, prompt, stop=["🙂b"])
    tokens = byte_ids(tokenizer, "a🙂".encode()) + ids_of(load("gemma"), "bc")
    assert [detokenizer.push([token_id]) for token_id in tokens[:-1]] == [
        TextDelta("a", None, 1),
        *[TextDelta("", None, 1)] * 4,
        TextDelta("", "🙂b", 1),
    ]


def test_a_stop_string_in_a_special_token_counts_only_when_it_is_shown() -> None:
    tokenizer = load("byte_level")
    tokens = ids_of(tokenizer, "hello<|im_end|>")
    assert Detokenizer(tokenizer, [], stop=["<|im_end|>"]).push(tokens).stop is None
    shown = Detokenizer(tokenizer, [], stop=["<|im_end|>"], shown_special_ids=None).push(tokens)
    assert shown == TextDelta("hello", "<|im_end|>", len(tokens))


def test_stop_strings_do_not_count_before_min_tokens_exist() -> None:
    tokenizer = load("byte_level")
    tokens = byte_ids(tokenizer, b"ab.ab.ab.")
    for min_tokens, expected in [
        (0, TextDelta("a", "b.", 3)),
        (2, TextDelta("a", "b.", 3)),
        (3, TextDelta("ab.a", "b.", 6)),
        (8, TextDelta("ab.ab.a", "b.", 9)),
        (9, TextDelta("ab.ab.ab.", None, 9)),
    ]:
        assert Detokenizer(tokenizer, [], stop=["b."], min_tokens=min_tokens).push(tokens) == expected


def test_the_prompt_cannot_complete_a_stop_string() -> None:
    tokenizer = load("byte_level")
    prompt, reply = byte_ids(tokenizer, b"the EN"), byte_ids(tokenizer, b"D is near")
    assert Detokenizer(tokenizer, prompt, stop=["END"]).push(reply) == TextDelta(
        "D is near", None, len(reply)
    )


def test_a_final_replacement_character_can_complete_a_stop_string() -> None:
    tokenizer = load("byte_level")
    detokenizer = Detokenizer(tokenizer, [], stop=["a\ufffd"])
    assert detokenizer.push(byte_ids(tokenizer, b"xa\xf0")) == TextDelta("x", None, 3)
    assert detokenizer.flush() == TextDelta("", "a\ufffd", 0)


def test_the_vocabulary_is_shared_between_requests() -> None:
    tokenizer = load("byte_level")
    one, two = Detokenizer(tokenizer, []), Detokenizer(tokenizer, [])
    crab = byte_ids(tokenizer, "🦀".encode())
    assert one._table is two._table
    assert one.push(crab[:2]).text == two.push(crab[:3]).text == ""
    assert (one.push(crab[2:]).text, two.push(crab[3:]).text) == ("🦀", "🦀")
