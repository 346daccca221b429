"""GrammarState: how far one reply has come in its grammar, and what may come next."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from engine.errors import frames_of
from engine.plan.grammar import TokenMask

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger("slipstream.engine")
T = TypeVar("T")

# Seconds that the matcher may compute for one reply: what it begins with, and what each token adds. Ordinary
# forms take a tenth of that, the largest less than a half.
FIRST_S = 0.5
TOKEN_S = 0.005
DEAR_S = 0.002  # a token: a draft is a mask more, and seldom saves as much


class GrammarState:
    """See Grammar. The matcher stands behind the committed tokens and `_ahead`, drafts it was last shown.

    Matchers never see the tokens that end a reply: the vocabulary they know has one end token of its own, at
    `vocab_size`, which stands for them. Every request has its own matcher. One that raises is as one that can
    be followed no further: from then on nothing is allowed. `clock` counts seconds that the calling thread
    computes.
    """

    __slots__ = (
        "_ahead",
        "_clock",
        "_end_bits",
        "_end_token_ids",
        "_foreseen",
        "_is_broken",
        "_masks",
        "_matcher",
        "_num_accepted",
        "_on_failure",
        "_spent_s",
        "_vocab_size",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        end_token_ids: frozenset[int],
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher = matcher
        self._on_failure = on_failure
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._end_bits = _bits(end_token_ids, vocab_size)
        self._is_broken = False
        self._ahead: list[int] = []
        self._masks: dict[
            tuple[int, ...], TokenMask
        ] = {}  # by drafts after what was accepted, as far as known
        self._foreseen: deque[tuple[int, bool]] = deque()  # accepted by the matcher, not committed yet
        self._clock = clock
        self._num_accepted = 0
        self._spent_s = 0.0

    @property
    def is_dear(self) -> bool:
        """See Grammar."""
        return self._spent_s > DEAR_S * (self._num_accepted + 1)

    def mask(self, path: Sequence[int]) -> TokenMask:
        """See Grammar."""
        if self._spent_s > FIRST_S + TOKEN_S * self._num_accepted:
            raise ValueError(f"its grammar takes more than {1000 * TOKEN_S:g} ms a token to be followed")
        mask = self._asked(lambda: self._mask(path))
        return np.zeros_like(self._end_bits) if mask is None else mask

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """See Grammar. A token that ends the reply does not count."""
        return self._asked(lambda: self._num_valid(token_ids)) or 0

    def accept(self, token_id: int) -> bool:
        """See Grammar."""
        if self._foreseen:
            foreseen, is_last = self._foreseen.popleft()
            self._is_broken = self._is_broken or foreseen != token_id
            return is_last
        return self._asked(lambda: self._accept(token_id)) or False

    def foresee(self, token_ids: Sequence[int]) -> None:
        """See Grammar."""
        for token_id in token_ids:
            if token_id in self._end_token_ids:
                return
            is_last = self._asked(partial(self._accept, token_id)) or False
            self._foreseen.append((token_id, is_last))
            if is_last:
                return

    def _asked(self, question: Callable[[], T]) -> T | None:
        """The answer; None if the matcher raises, or has raised before."""
        if self._is_broken:
            return None
        began = self._clock()
        try:
            return question()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library, which is in Rust, is no Exception
            log.error("a grammar's matcher failed", extra=frames_of(error))
            self._is_broken = True
            self._on_failure()
            return None
        finally:
            self._spent_s += self._clock() - began

    def _mask(self, path: Sequence[int]) -> TokenMask:
        known = self._masks.get(tuple(path))
        if known is None:
            known = self._masks[tuple(path)] = self._new_mask(path)
        return known

    def _new_mask(self, path: Sequence[int]) -> TokenMask:
        if not self._move(path):
            return np.full_like(self._end_bits, 0xFF)
        mask, may_end = self._look()
        if may_end:
            if path and not mask.any():  # the reply has ended: nothing is drawn here
                return np.full_like(self._end_bits, 0xFF)
            mask |= self._end_bits
        return mask

    def _num_valid(self, token_ids: Sequence[int]) -> int:
        self._move(())
        valid = self._matcher.validate_tokens(list(token_ids))
        ends = (index for index, token_id in enumerate(token_ids) if token_id in self._end_token_ids)
        return min(valid, next(ends, valid))

    def _accept(self, token_id: int) -> bool:
        self._num_accepted += 1
        self._masks.clear()
        if not self._move((token_id,)):  # the matcher has failed: the masks allow nothing else
            self._masks[()] = self._fail()
            return False
        self._ahead.clear()
        if not self._matcher.is_accepting():
            return False
        mask, may_end = self._look()
        if may_end and not mask.any():
            return True
        self._masks[()] = mask | self._end_bits if may_end else mask
        return False

    def _move(self, path: Sequence[int]) -> bool:
        """Stand behind `path`; False, and somewhere on the way, if that cannot be or the reply ends there."""
        common = 0
        for shown, wanted in zip(self._ahead, path, strict=False):
            if shown != wanted:
                break
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
            del self._ahead[common:]
        rest = list(path[common:])
        if not rest:
            return True
        if not self._end_token_ids.isdisjoint(rest):
            return False
        count = self._matcher.try_consume_tokens(rest)
        self._ahead += rest[:count]
        return count == len(rest)

    def _look(self) -> tuple[TokenMask, bool]:
        """The tokens of the text that may follow here, and whether the reply may end here."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        place, bit = divmod(self._vocab_size, 8)
        may_end = bool(bits[place] >> bit & 1)
        mask = bits[: len(self._end_bits)].copy()
        if bit:
            mask[place] &= (1 << bit) - 1
        if self._matcher.is_error():
            return self._fail(), False
        return mask, may_end

    def _fail(self) -> TokenMask:
        """Nothing may follow any more."""
        # The matcher's own words may hold text of the reply.
        log.warning("a grammar cannot be followed any further: %s", self._matcher.stop_reason())
        self._on_failure()
        return np.zeros_like(self._end_bits)


def _bits(token_ids: frozenset[int], vocab_size: int) -> TokenMask:
    bits = np.zeros(vocab_size, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")
