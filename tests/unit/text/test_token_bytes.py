from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from engine.errors import StartRefused
from engine.text.token_bytes import TokenBytes
from tests.unit.text.builders import BACKENDS, SPECIAL_TOKENS, byte_level, id_of, llama_style


@pytest.mark.parametrize("skip_special_tokens", [False, True])
@pytest.mark.parametrize("kind", BACKENDS)
def test_every_single_token_decodes_as_its_library_does(kind: str, skip_special_tokens: bool) -> None:
    backend = BACKENDS[kind]()
    pieces = TokenBytes.of(backend)
    assert len(pieces) == backend.get_vocab_size()
    for token_id in range(len(pieces)):
        expected = backend.decode([token_id], skip_special_tokens=skip_special_tokens)
        assert pieces.decode([token_id], skip_special_tokens=skip_special_tokens) == expected


def test_special_tokens_are_text_or_nothing() -> None:
    backend = byte_level()
    pieces = TokenBytes.of(backend)
    for token in SPECIAL_TOKENS:
        token_id = id_of(backend, token)
        assert pieces.table(skip_special_tokens=False)[token_id] == token.encode()
        assert pieces.table(skip_special_tokens=True)[token_id] == b""
    think = id_of(backend, "<think>")  # added, but part of the text
    assert pieces.table(skip_special_tokens=True)[think] == b"<think>"


def test_a_token_may_be_part_of_a_character() -> None:
    pieces = TokenBytes.of(llama_style())
    ids = [id_of(llama_style(), f"<0x{byte:02X}>") for byte in "🦀".encode()]
    assert [pieces.table(skip_special_tokens=True)[token_id] for token_id in ids] == [
        b"\xf0",
        b"\x9f",
        b"\xa6",
        b"\x80",
    ]
    assert pieces.decode(ids, skip_special_tokens=True) == "🦀"


def test_an_unknown_id_adds_nothing() -> None:
    pieces = TokenBytes.of(byte_level())
    hello = byte_level().encode("hello", add_special_tokens=False).ids
    assert pieces.decode([len(pieces), *hello, 10**6], skip_special_tokens=True) == "hello"
    assert pieces.decode([], skip_special_tokens=True) == ""


def test_a_hole_in_the_ids_has_no_bytes() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    pieces = TokenBytes.of(backend)
    assert list(pieces.table(skip_special_tokens=False)) == [b" a", b"", b"", b" b"]


def test_the_longest_token_counts_characters_and_added_tokens() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "世界": 1}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    assert TokenBytes.of(backend).max_chars == 2
    backend.add_tokens([AddedToken("a longer one", special=True)])
    assert TokenBytes.of(backend).max_chars == 12


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("a+"), "b")]),
    ],
    ids=lambda decoder: json.loads(decoder.__getstate__())["type"],
)
def test_a_decoder_that_is_no_join_of_tokens_is_refused(decoder: decoders.Decoder) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(StartRefused, match="decoder cannot be streamed exactly"):
        TokenBytes.of(backend)
