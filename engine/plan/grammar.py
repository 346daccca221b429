"""Grammar: what the tokens of a reply must follow. What compiles and walks grammars is in `engine.text`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.uint8]  # [ceil(vocab / 8)] one bit a token id, the lowest id in the lowest bit


class Grammar(Protocol):
    """Where one reply stands in its grammar; it follows the committed tokens.

    One thread at a time: the target's while a step that draws for the reply is in flight, else the loop's.
    """

    @property
    def is_dear(self) -> bool:
        """True while following it takes so long that drafts for the reply would not pay."""

    def mask(self, path: Sequence[int]) -> TokenMask:
        """The tokens that may follow what is committed and then `path`, which are drafts.

        All of them where the drafts break the grammar or end the reply: nothing is drawn there. None of them
        when the grammar has become too complex to be followed. Never written again. Not for the loop's
        thread, for it may take long. Raises ValueError where the reply has used up the time it may take.
        """

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many of these drafts, from the first on, may follow what is committed."""

    def foresee(self, token_ids: Sequence[int]) -> None:
        """Work out what `accept`, O(1) then, will say of these tokens, which may take long. Never raises."""

    def accept(self, token_id: int) -> bool:
        """A token is committed, not one that ends the reply by its id; True if no other may follow it."""


@dataclass(frozen=True, slots=True)
class MaskOf:
    """One row's mask, worked out only where the row is drawn: `path` are the drafts before it."""

    grammar: Grammar
    path: tuple[int, ...] = ()

    def bits(self) -> TokenMask:
        """See Grammar.mask."""
        return self.grammar.mask(self.path)


class CompiledGrammar(Protocol):
    """A grammar that any number of replies may follow, each from its beginning."""

    def start(self, end_token_ids: frozenset[int]) -> Grammar:
        """For a reply that these tokens end, where the grammar lets it end."""
