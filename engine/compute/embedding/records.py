"""Records of a model that embeds or scores: a text as it reads it, and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids; `type_ids` say which of a pair each is of, None that all are of the first.

    The first `num_prompt_tokens` are of a prompt that pooling may leave out.
    """

    token_ids: Sequence[int]
    type_ids: Sequence[int] | None = None
    num_prompt_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class EmbedderInfo:
    """What was loaded. `dimensions` is a vector's width; a cross-encoder, which scores pairs, has none."""

    max_model_len: int
    vocab_size: int
    dimensions: int | None
    dtype: str
    device: str

    @property
    def scores_pairs(self) -> bool:
        """True for a cross-encoder."""
        return self.dimensions is None
