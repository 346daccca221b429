"""SuffixAutomaton: every substring of a growing text, with what followed it and how often.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built online. Text can be
added but never taken back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

_ROOT = 0
_NONE = -1
_MAX_COUNTED = 8  # suffixes that one token counts for: what bounds its cost in text that repeats itself
ESCAPE = 1.3  # measured: after a match of m tokens seen c times, something new follows at about 1.3 / (m * c)

_LONG = 2  # tokens
_MAX_FOLLOWERS = 32  # with more of them none is likely enough to look for


class Match(NamedTuple):
    """The longest suffix of what was read that occurs in the text: `length` tokens, ending in `state`."""

    state: int
    length: int


class Continuation(NamedTuple):
    """What may follow a match, and the chance of each token where all before it did."""

    token_ids: list[int]
    chances: list[float]


class SuffixAutomaton:
    """Adding a token takes 1 to 5 µs whatever the length of the text, and 120 bytes, 300 at worst.

    A state stands for substrings that end at the same places; `link` leads to the longest suffix that also
    ends elsewhere. Most states have one transition, which is kept in two numbers; the others are in a dict.
    Counts of short substrings miss those occurrences that ended a much longer repetition.
    """

    __slots__ = ("_count", "_last", "_length", "_link", "_more", "_target", "_token", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._count = array("i", [0])
        self._token = array("i", [_NONE])  # of the first transition
        self._target = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}  # the other transitions
        self._last = _ROOT

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the end of the text."""
        for token_id in token_ids:
            self._count_repeat()
            self._add(token_id)

    def longest_repeat(self) -> Match:
        """The longest suffix of the text that also ends somewhere before its end; empty at the root."""
        state = max(_ROOT, self._link[self._last])
        return Match(state, self._length[state])

    def follow(self, match: Match, token_ids: Iterable[int]) -> Match:
        """The match after reading these tokens too, which are not added."""
        state, length = match
        for token_id in token_ids:
            target = self._next(state, token_id)
            while target == _NONE and state != _ROOT:
                state = self._link[state]
                length = self._length[state]
                target = self._next(state, token_id)
            if target != _NONE:
                state, length = target, length + 1
        return Match(state, length)

    def continuation(self, match: Match, num_wanted: int, chance: float, min_chance: float) -> Continuation:
        """What most often followed, token by token, while all of it follows again with more than this chance.

        `chance` is that of the match itself. Where the text ends, a shorter suffix goes on.
        """
        found = Continuation([], [])
        token_ids = found.token_ids
        state, length = match
        while len(token_ids) < num_wanted:
            if self._token[state] == _NONE:
                state = self._link[state]
                length = self._length[state]
            if length == 0:
                break
            token_id, target, share = self._likeliest(state, length)
            chance *= share
            if chance <= min_chance:
                break
            token_ids.append(token_id)
            found.chances.append(max(0.0, min(1.0, share)))
            state, length = target, length + 1
        return found

    def _likeliest(self, state: int, length: int) -> tuple[int, int, float]:
        """The token that most often followed, the state it leads to, and the chance that it follows again.

        Where a shorter suffix, still long, was followed by several tokens, the longer match is trusted the
        less the more of it that suffix is: the fields of a record differ, however alike the records are.
        """
        count = self._count
        token_id, target = self._token[state], self._target[state]
        others = self._more.get(state)
        if others is not None:
            if len(others) >= _MAX_FOLLOWERS:
                return token_id, target, 0.0
            for other_id, other in others.items():
                if count[other] > count[target]:
                    token_id, target = other_id, other
        chance = _chance(count[target], count[state], length)
        parent = self._link[state]
        parent_length = self._length[parent]
        if parent_length >= _LONG:
            share = parent_length / length
            same = count[self._next(parent, token_id)]
            chance = (1.0 - share) * chance + share * _chance(same, count[parent], parent_length)
        return token_id, target, chance

    def _next(self, state: int, token_id: int) -> int:
        """The state that this token leads to; _NONE if it never followed."""
        if self._token[state] == token_id:
            return self._target[state]
        others = self._more.get(state)
        return _NONE if others is None else others.get(token_id, _NONE)

    def _count_repeat(self) -> None:
        """The end of the text is about to be followed: it is an occurrence like any other of its suffixes."""
        link, count = self._link, self._count
        state = link[self._last]
        for _ in range(_MAX_COUNTED):
            if state <= _ROOT:
                return
            count[state] += 1
            state = link[state]

    def _add(self, token_id: int) -> None:
        link, tokens, more = self._link, self._token, self._more
        self.num_tokens += 1
        state = self._last
        new = self._last = self._new_state(self.num_tokens)
        while state != _NONE:
            if tokens[state] == token_id:
                break
            if tokens[state] == _NONE:
                tokens[state] = token_id
                self._target[state] = new
            else:
                others = more.get(state)
                if others is None:
                    more[state] = {token_id: new}
                elif token_id in others:
                    break
                else:
                    others[token_id] = new
            state = link[state]
        if state == _NONE:
            link[new] = _ROOT
            return
        target = self._next(state, token_id)
        if self._length[target] != self._length[state] + 1:
            target = self._split(state, token_id, target)
        link[new] = target

    def _new_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_ROOT)
        self._count.append(1)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Give the substrings of `target` that `state` leads to, which now end here too, their own state."""
        short = self._new_state(self._length[state] + 1)
        for numbers in (self._link, self._count, self._token, self._target):
            numbers[short] = numbers[target]
        if target in self._more:
            self._more[short] = self._more[target].copy()
        self._link[target] = short
        while state != _NONE and self._next(state, token_id) == target:
            if self._token[state] == token_id:
                self._target[state] = short
            else:
                self._more[state][token_id] = short
            state = self._link[state]
        return short


def _chance(count: int, total: int, length: int) -> float:
    """That what followed `count` of `total` matches of this length follows the next one."""
    total = max(count, total)  # short substrings are counted less often
    return count / total * (1.0 - ESCAPE / (length * total))
