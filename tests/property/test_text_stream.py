"""Streamed text and text decoded whole are the same text, whatever the tokens and wherever the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from tests.support.examples import share_of
from tests.unit.text.builders import BACKENDS, load

KINDS = list(BACKENDS)
BYTE_KINDS = ["byte_level", "llama", "gemma"]
SPELLINGS = [
    "a",
    "b",
    " ",
    "\n",
    ".",
    "é",
    "e\u0301",
    "你",
    "好",
    "नि",
    "안",
    "🦀",
    "🙂\ufe0f",
    "👩\u200d👧",
    "\ufffd",
]
CHARACTERS = st.lists(st.sampled_from(SPELLINGS), max_size=30).map("".join)
ANY_TEXT = st.one_of(CHARACTERS, st.text(st.characters(exclude_categories=["Cs"]), max_size=30))

quick = settings(max_examples=share_of(150), deadline=None)


@cache
def single_byte_ids(kind: str) -> dict[int, int]:
    """The id of the token that is just one byte."""
    tokenizer = load(kind)
    found = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return {byte: found[bytes([byte])] for byte in range(256)}


@st.composite
def token_ids(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens of real text, tokens drawn at random, and bytes that need not be UTF-8, in any mixture."""
    tokenizer = load(kind)
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12)
    text_ids = ANY_TEXT.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    parts = [random_ids, text_ids]
    if kind in BYTE_KINDS:
        single = single_byte_ids(kind)
        parts.append(st.binary(max_size=8).map(lambda data: [single[byte] for byte in data]))
        parts.append(ANY_TEXT.map(lambda text: [single[byte] for byte in text.encode()]))
    return [token_id for part in draw(st.lists(st.one_of(parts), max_size=4)) for token_id in part]


def cut(data: st.DataObject, tokens: Sequence[int]) -> list[Sequence[int]]:
    """`tokens` in pieces of any size, empty ones included."""
    points = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=10)))
    return [tokens[start:end] for start, end in zip([0, *points], [*points, len(tokens)], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(data=st.data())
def test_a_stream_is_the_whole_reply(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(token_ids(kind))
    skip = data.draw(st.booleans())
    whole = load(kind).decode(tokens, skip_special_tokens=skip)
    detokenizer = Detokenizer(load(kind), [], shown_special_ids=frozenset() if skip else None)
    shown = ""
    for piece in cut(data, tokens):
        shown += detokenizer.push(piece).text
        assert whole.startswith(shown)
    assert shown + detokenizer.flush().text == whole


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(data=st.data())
def test_a_stream_continues_the_text_of_its_prompt(kind: str, data: st.DataObject) -> None:
    """A prompt that ends with a whole character and the reply after it are the text of both together."""
    tokenizer = load(kind)
    prompt = tokenizer.encode(data.draw(ANY_TEXT), add_special_tokens=data.draw(st.booleans()))
    tokens = data.draw(token_ids(kind))
    detokenizer = Detokenizer(tokenizer, prompt)
    reply = "".join(detokenizer.push([token_id]).text for token_id in tokens) + detokenizer.flush().text
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    assert before + reply == tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(data=st.data())
def test_decoding_agrees_with_the_tokenizers_package(kind: str, data: st.DataObject) -> None:
    """Always, except for ill-formed `<0xNN>` runs, of which the package replaces the well-formed part too."""
    tokens = data.draw(token_ids(kind))
    skip = data.draw(st.booleans())
    ours = load(kind).decode(tokens, skip_special_tokens=skip)
    theirs = BACKENDS[kind]().decode(tokens, skip_special_tokens=skip)
    if kind not in ("llama", "gemma") or "\ufffd" not in theirs:
        assert ours == theirs


@pytest.mark.parametrize("kind", BYTE_KINDS)
@quick
@given(text=ANY_TEXT, data=st.data())
def test_good_text_never_shows_a_replacement_character(kind: str, text: str, data: st.DataObject) -> None:
    single = single_byte_ids(kind)
    tokens = [single[byte] for byte in text.replace("\ufffd", "").encode()]
    detokenizer = Detokenizer(load(kind), [single[ord("x")]])
    shown = [detokenizer.push(piece).text for piece in cut(data, tokens)]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text.replace("\ufffd", "")
