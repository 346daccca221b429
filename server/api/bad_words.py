"""From the request's `bad_words` to the token sequences that must not be completed, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Sequence

from engine import Engine, InvalidRequest


async def read_bad_words(
    words: Sequence[str], engine: Engine, tenant: str | None = None
) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, as it begins a text and as it follows a space; off the loop, in `tenant`'s turns.

    The second spelling counts where it has as many tokens and another first one: otherwise its space is a
    token by itself, and the first spelling covers it. A word with a token that the model lacks cannot come.
    Raises InvalidRequest.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain = await _encode(word.lstrip(), engine, tenant)
        spaced = await _encode(" " + word.lstrip(), engine, tenant)
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            sequences.append(spaced)
    vocab_size = engine.info.vocab_size
    return tuple(each for each in sequences if each and max(each) < vocab_size)


async def _encode(text: str, engine: Engine, tenant: str | None) -> tuple[int, ...]:
    try:
        return tuple(await engine.text.encode(text, add_special_tokens=False, tenant=tenant))
    except InvalidRequest as error:
        error.param = "bad_words"
        raise
