"""Bad words as vLLM reads them: with and without a space before, where that makes another word."""

from __future__ import annotations

from typing import Any, Self, cast

import pytest

from engine import InvalidRequest
from server.api.bad_words import read_bad_words

TOKENS = {
    "cat": [1],
    " cat": [2],
    "dog": [3, 4],
    " dog": [5, 4],
    "emu": [6],
    " emu": [9, 6],  # the space is a token of its own
    "fox": [7],
    " fox": [7],  # the tokenizer drops the space
    "new": [50],
    " new": [8],
}


class Encoder:
    """The part of the engine that is asked; it knows ids below 50."""

    class info:
        vocab_size = 50

    @property
    def text(self) -> Self:
        return self

    async def encode(self, text: str, *, add_special_tokens: bool, tenant: str | None) -> list[int]:
        assert not add_special_tokens
        if text.strip() == "bad":
            raise InvalidRequest("no", param="prompt")
        return TOKENS[text]


async def read(*words: str) -> tuple[tuple[int, ...], ...]:
    return await read_bad_words(words, cast(Any, Encoder()))


@pytest.mark.parametrize(
    ("word", "sequences"),
    [
        ("cat", ((1,), (2,))),
        (" cat", ((1,), (2,))),
        ("dog", ((3, 4), (5, 4))),
        ("emu", ((6,),)),
        ("fox", ((7,),)),
        ("new", ((8,),)),
    ],
)
async def test_both_spellings_count_where_they_differ(
    word: str, sequences: tuple[tuple[int, ...], ...]
) -> None:
    assert await read(word) == sequences


async def test_an_error_names_the_field() -> None:
    with pytest.raises(InvalidRequest) as refused:
        await read("cat", "bad")
    assert refused.value.param == "bad_words"
