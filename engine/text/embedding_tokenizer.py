"""EmbeddingTokenizer: texts and pairs of texts to token ids, for models that embed or score them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import InvalidRequest
from engine.text.tokenizer import load_fast_tokenizer

CHARS_A_TOKEN = 128  # on average, more than any text has: what is longer is too long before it is read


class TokenizedText(NamedTuple):
    """Token ids of a text or a pair; `type_ids` say which each is of, None that all are of the first."""

    token_ids: list[int]
    type_ids: list[int] | None


class EmbeddingTokenizer:
    """Never written after it is built: any thread may call anything at any time."""

    def __init__(self, directory: Path, *, lower_case: bool = False) -> None:
        """Reads the tokenizer.json in `directory` and no code from it. Raises StartRefused."""
        tokenizer = load_fast_tokenizer(directory)
        self._backend: Any = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._lower_case = lower_case

    def encode(self, text: str, *, special: bool = True, most: int | None = None) -> TokenizedText:
        """The ids of a text, cut to its first `most` with the special tokens kept. Raises InvalidRequest."""
        (encoding,) = self._backend.encode_batch_fast([self._read(text)], add_special_tokens=special)
        if most is not None and len(encoding.ids) > most:
            (encoding,) = self._backend.encode_batch_fast([self._read(text)], add_special_tokens=False)
            room = most - (self._backend.num_special_tokens_to_add(False) if special else 0)
            encoding.truncate(max(1, room))
            encoding = self._backend.post_process(encoding, None, special)
        return self._taken(encoding)

    def encode_pair(self, first: str, second: str, *, most: int | None = None) -> TokenizedText:
        """The ids of two texts as one; over `most`, the longer one is cut first. Raises InvalidRequest."""
        texts = (self._read(first), self._read(second))
        (encoding,) = self._backend.encode_batch_fast([texts], add_special_tokens=True)
        if most is not None and len(encoding.ids) > most:
            parts = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            room = max(2, most - self._backend.num_special_tokens_to_add(True))
            lengths = cut_longest([len(part.ids) for part in parts], room)
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length)
            encoding = self._backend.post_process(*parts, True)
        return self._taken(encoding)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Tokens of a text that are of the prompt before it, as sentence-transformers counts them."""
        token_ids = self.encode(prompt).token_ids
        return len(token_ids) - (bool(token_ids) and token_ids[-1] in self._special_ids)

    def _read(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"character {error.start} of a text is a lone surrogate, which is not valid Unicode"
            raise InvalidRequest(reason, param="input") from None
        return text.lower() if self._lower_case else text

    def _taken(self, encoding: Any) -> TokenizedText:
        type_ids = list(encoding.type_ids) if self._has_types else []
        return TokenizedText(list(encoding.ids), type_ids if any(type_ids) else None)


def cut_longest(lengths: Sequence[int], room: int) -> list[int]:
    """Two lengths that fill `room` at most, taken from the longer one first; each at least 1."""
    shorter = min(*lengths, max(1, room // 2))
    longer = min(max(lengths), room - shorter)
    return [longer, shorter] if lengths[0] >= lengths[1] else [shorter, longer]
