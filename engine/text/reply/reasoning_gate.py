"""ReasoningGate: a reply's grammar holds from the token behind its reasoning on, which a budget may end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from engine.plan.grammar import CompiledGrammar, Grammar, TokenMask
from engine.text.reply.reasoning_place import Phase, Place, ReasoningTrack


class ReasoningMarks:
    """What the gates of one model share: its marks as tokens, and which tokens may not end a reasoning.

    `begin` and `end` are the marks as the tokenizer spells them. Built once a model; any thread.
    """

    def __init__(
        self, track: ReasoningTrack, begin: Sequence[int], end: Sequence[int], table: Sequence[bytes]
    ) -> None:
        self.track = track
        self.begin = tuple(begin)
        self.end = tuple(end)
        self._table = table
        self._mark = track.form.end.encode()
        self._overshooting = lru_cache(maxsize=256)(self._search)

    def overshooting(self, tail: bytes) -> tuple[int, ...]:
        """The tokens that complete the end mark behind `tail` and go on with more than whitespace.

        What would follow the mark inside of such a token is not drawn by a grammar's leave.
        """
        mark = self._mark
        return self._overshooting(tuple(size for size in range(1, len(mark)) if tail.endswith(mark[:size])))

    def _search(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The same where the mark has begun, in so many bytes of it; several beginnings may be under way."""
        mark, rests = self._mark, tuple(self._mark[size:] for size in sizes)
        found = []
        for token_id, piece in enumerate(self._table):
            if mark in piece:
                surplus = piece.partition(mark)[2]
            elif rests and piece.startswith(rests):
                surplus = next(piece[len(rest) :] for rest in rests if piece.startswith(rest))
            else:
                continue
            if surplus.strip():
                found.append(token_id)
        return tuple(found)


class ReasoningGate:
    """A CompiledGrammar that lets the reply think first; `grammar` None: what follows may be anything.

    `place` is where the reply begins. After `budget` tokens of reasoning the end mark is forced; None: never.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        place: Place,
        vocab_size: int,
        grammar: CompiledGrammar | None,
        budget: int | None = None,
    ) -> None:
        self._marks = marks
        self._place = place
        self._vocab_size = vocab_size
        self._grammar = grammar
        self._budget = budget

    def start(self, end_token_ids: frozenset[int]) -> Grammar:
        """See CompiledGrammar; O(1)."""
        inner = None if self._grammar is None else self._grammar.start(end_token_ids)
        masks = _Masks(self._marks, self._vocab_size, end_token_ids if inner is not None else frozenset())
        return _GatedState(masks, inner, self._budget, self._place)


class _Masks:
    """Masks of one reply's reasoning. `forbidden` are the tokens that would end the reply within it."""

    def __init__(self, marks: ReasoningMarks, vocab_size: int, forbidden: frozenset[int]) -> None:
        self.marks = marks
        self._vocab_size = vocab_size
        self._forbidden = forbidden
        self.all = self._full()

    def _full(self) -> TokenMask:
        return np.packbits(np.ones(self._vocab_size, np.uint8), bitorder="little")

    def only(self, token_id: int) -> TokenMask:
        """No other token."""
        mask = np.zeros_like(self.all)
        mask[token_id >> 3] = 1 << (token_id & 7)
        return mask

    def thinking(self, tail: bytes) -> TokenMask:
        """What may be thought next, where a grammar follows."""
        mask = self.all.copy()
        for token_id in (*self._forbidden, *self.marks.overshooting(tail)):
            if token_id < self._vocab_size:
                mask[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
        return mask


def allows(mask: TokenMask, token_id: int) -> bool:
    """True if the mask lets this token through."""
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


class _Walk:
    """From a committed place along tokens, to the first that is the inner grammar's, or is not allowed."""

    def __init__(self, state: _GatedState, token_ids: Sequence[int]) -> None:
        self.place = state.place
        self.num_begun = state.num_begun
        self.num_taken = 0
        self.is_allowed = True
        for token_id in token_ids:
            is_over = self.place.phase is Phase.AFTER and not state.repeats
            if is_over or not self._take(state, token_id):
                break
            self.num_taken += 1

    def _take(self, state: _GatedState, token_id: int) -> bool:
        """Step over one token of the reasoning; False where it is none, or not allowed."""
        if self.place.phase is Phase.BEFORE and state.inner is not None:
            begin = state.masks.marks.begin
            if token_id != begin[self.num_begun]:
                if self.num_begun or state.insists:
                    self.is_allowed = False
                else:
                    self.place = Place(Phase.AFTER)
                return False
            self.num_begun += 1
            if self.num_begun == len(begin):
                self.place = Place(Phase.THINKING)
            return True
        if not allows(state.own_mask(self.place, self.num_begun), token_id):
            self.is_allowed = False
            return False
        self.place = state.masks.marks.track.step(self.place, token_id)
        return True


class _GatedState:
    """See Grammar. Where the reasoning ends the inner grammar begins, with the next token."""

    __slots__ = ("_budget", "inner", "insists", "masks", "num_begun", "place", "repeats")

    def __init__(self, masks: _Masks, inner: Grammar | None, budget: int | None, place: Place) -> None:
        self.masks = masks
        self.inner = inner
        self.insists = masks.marks.track.form.insists
        self.repeats = masks.marks.track.form.repeats and inner is None
        self.place = place
        self.num_begun = 0  # tokens of the begin mark so far, where a grammar follows
        self._budget = budget

    @property
    def is_dear(self) -> bool:
        """See Grammar."""
        return self.inner is not None and self.place.phase is Phase.AFTER and self.inner.is_dear

    def mask(self, path: Sequence[int]) -> TokenMask:
        """See Grammar."""
        walk = _Walk(self, path)
        rest = path[walk.num_taken :]
        if not walk.is_allowed:
            return self.masks.all
        if walk.place.phase is Phase.AFTER:
            return self.masks.all if self.inner is None else self.inner.mask(rest)
        return self.own_mask(walk.place, walk.num_begun)

    def own_mask(self, place: Place, num_begun: int) -> TokenMask:
        """What may follow at a place before the reasoning's end."""
        marks = self.masks.marks
        if place.phase is Phase.THINKING:
            over = -1 if self._budget is None else place.num_thought - self._budget
            if over >= 0:
                return self.masks.only(marks.end[min(over, len(marks.end) - 1)])
            return self.masks.all if self.inner is None else self.masks.thinking(place.tail)
        if self.inner is None:
            return self.masks.all
        begin = self.masks.only(marks.begin[num_begun])
        return begin if num_begun or self.insists else begin | self.inner.mask(())

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """See Grammar."""
        walk = _Walk(self, token_ids)
        rest = token_ids[walk.num_taken :]
        if not walk.is_allowed or not rest:
            return walk.num_taken
        return walk.num_taken + (len(rest) if self.inner is None else self.inner.num_valid(rest))

    def foresee(self, token_ids: Sequence[int]) -> None:
        """See Grammar."""
        walk = _Walk(self, token_ids)
        rest = token_ids[walk.num_taken :]
        if self.inner is not None and walk.place.phase is Phase.AFTER and rest:
            self.inner.foresee(rest)

    def accept(self, token_id: int) -> bool:
        """See Grammar."""
        if self.place.phase is not Phase.AFTER or self.repeats:
            walk = _Walk(self, (token_id,))
            self.place, self.num_begun = walk.place, walk.num_begun
            if walk.num_taken or not walk.is_allowed:
                return False
        return self.inner is not None and self.inner.accept(token_id)
