"""TextReader: texts and pairs of a request to token ids, off the event loop, in their tenant's turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.compute.embedding.records import EncodedText
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.loop.text_thread import TextThread
from engine.plan.admission import check_token_ids
from engine.text.embedding_tokenizer import CHARS_A_TOKEN, EmbeddingTokenizer

if TYPE_CHECKING:  # it brings torch along, which the server does without until it loads the model
    from engine.compute.embedding.embedder import Embedder

_TEXTS_A_TURN = 32  # that are tokenized before it is another tenant's turn


@dataclass(frozen=True, slots=True)
class EmbeddingParts:
    """What loading gives the service. `prompts` go before a text by name, `default_prompt` always does."""

    embedder: Embedder
    tokenizer: EmbeddingTokenizer
    prompts: dict[str, str]
    default_prompt: str | None
    pools_prompt: bool


@dataclass(frozen=True, slots=True)
class TextReading:
    """How the texts in a request's field `param` are read: cut to `most` tokens each, None for no cut.

    `prompt` names one of the model's own to put before each, None the one that it always uses; not for pairs.
    """

    param: str
    tenant: str | None = None
    most: int | None = None
    prompt: str | None = None
    adds_special_tokens: bool = True


class TextReader:
    """Reads texts as a model does; `text` is where the tokenizer runs. Loop thread only."""

    def __init__(self, parts: EmbeddingParts, text: TextThread) -> None:
        self._parts = parts
        self._text = text

    async def encode(self, items: Sequence[tuple[str, ...]], reading: TextReading) -> list[EncodedText]:
        """The tokens of texts, or of pairs for a cross-encoder, off the loop, in turns of their tenant.

        Raises InvalidRequest.
        """
        prompt = self._prompt(reading.prompt)
        found: list[EncodedText] = []
        for first in range(0, len(items), _TEXTS_A_TURN):
            turn = items[first : first + _TEXTS_A_TURN]
            self._check_lengths(turn, reading)
            try:
                found += await self._text.run(
                    partial(_encode, self._parts, turn, reading, prompt), "tokenizer", reading.tenant
                )
            except InvalidRequest as error:
                error.param = reading.param
                raise
            for each in found[first:]:
                self.check_tokens(each.token_ids, reading.param)
        return found

    def _check_lengths(self, items: Sequence[tuple[str, ...]], reading: TextReading) -> None:
        """Refuse unread what is too long whatever its tokens are."""
        limit = self._parts.embedder.info.max_model_len
        num_chars = max(sum(map(len, item)) for item in items)
        if reading.most is None and num_chars > limit * CHARS_A_TOKEN:
            raise _too_long(limit, num_chars // CHARS_A_TOKEN, reading.param)

    def check_tokens(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for a text that is empty, too long, or holds ids outside the vocabulary."""
        info = self._parts.embedder.info
        if not token_ids:
            raise InvalidRequest(f"'{param}' holds a text without any token.", param)
        if len(token_ids) > info.max_model_len:
            raise _too_long(info.max_model_len, len(token_ids), param)
        check_token_ids(param, token_ids, info.vocab_size)

    def _prompt(self, name: str | None) -> str:
        parts = self._parts
        name = name or parts.default_prompt
        if name is None:
            return ""
        if name not in parts.prompts:
            known = ", ".join(sorted(parts.prompts)) or "none"
            raise InvalidRequest(f"'prompt_name' must be one of the model's prompts: {known}.", "prompt_name")
        return parts.prompts[name]


def _encode(
    parts: EmbeddingParts, items: Sequence[tuple[str, ...]], reading: TextReading, prompt: str
) -> list[EncodedText]:
    """The tokens of texts or pairs. In any thread."""
    tokenizer, most = parts.tokenizer, reading.most
    num_chars = None if most is None else most * CHARS_A_TOKEN
    left_out = tokenizer.num_prompt_tokens(prompt) if prompt and not parts.pools_prompt else 0
    found = []
    for item in items:
        if len(item) == 2:
            first, second = (text[:num_chars] for text in item)
            found.append(EncodedText(*tokenizer.encode_pair(first, second, most=most)))
            continue
        text = (prompt + item[0])[:num_chars]
        ids, types = tokenizer.encode(text, special=reading.adds_special_tokens, most=most)
        found.append(EncodedText(ids, types, min(left_out, len(ids) - 1)))
    return found


def _too_long(limit: int, num_tokens: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(limit=limit, prompt_tokens=num_tokens, max_tokens=0, param=param)
