"""TokenHistory: the tokens of one sequence, counted as they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from engine.plan.step_records import Int64, TokenCounts

_FIRST_ROOM = 64  # distinct tokens; doubled whenever they do not fit


class TokenHistory:
    """Counts a sequence's tokens for its penalties: each token is looked at once, whoever asks how often.

    The distinct tokens stand in the order of their first appearance, those of the prompt first. One thread at
    a time.
    """

    __slots__ = ("_in_output", "_num_in_prompt", "_num_prompt_tokens", "_places", "_token_ids", "num_tokens")

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_tokens = 0  # counted so far
        self._num_prompt_tokens = num_prompt_tokens
        self._num_in_prompt = 0  # distinct ones
        self._places: dict[int, int] = {}  # where each distinct token stands
        self._token_ids: Int64 = np.zeros(_FIRST_ROOM, np.int64)
        self._in_output: Int64 = np.zeros(_FIRST_ROOM, np.int64)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count what has come to the sequence, which begins with what was counted before. O(new)."""
        new = token_ids[self.num_tokens :]
        num_prompt_tokens = max(0, self._num_prompt_tokens - self.num_tokens)
        if num_prompt_tokens:
            self._count(dict.fromkeys(new[:num_prompt_tokens], 0))
            self._num_in_prompt = len(self._places)
        self._count(Counter(new[num_prompt_tokens:]))
        self.num_tokens += len(new)

    def _count(self, tokens: Mapping[int, int]) -> None:
        """Count these tokens, each so many times as output."""
        for token_id, number in tokens.items():
            place = self._places.get(token_id)
            if place is None:
                place = self._add(token_id)
            self._in_output[place] += number

    def _add(self, token_id: int) -> int:
        place = self._places[token_id] = len(self._places)
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
            self._in_output = np.concatenate((self._in_output, np.zeros_like(self._in_output)))
        self._token_ids[place], self._in_output[place] = token_id, 0
        return place

    def cut(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of those counted. O(taken back), but for a cut prompt."""
        if num_tokens < min(self.num_tokens, self._num_prompt_tokens):
            self._places.clear()
            self.num_tokens = self._num_in_prompt = 0
            self.follow(token_ids[:num_tokens])
            return
        for token_id in reversed(token_ids[num_tokens : self.num_tokens]):
            place = self._places[token_id]
            self._in_output[place] -= 1
            if place >= self._num_in_prompt and not self._in_output[place]:
                del self._places[token_id]  # the last of all: what first came later is gone already
        self.num_tokens = min(self.num_tokens, num_tokens)

    def counts(self, path: Sequence[int] = ()) -> TokenCounts:
        """What was counted, and `path` as more output behind it; a copy. O(path), beside the copying."""
        num_distinct = len(self._places)
        token_ids, in_output = self._token_ids[:num_distinct].copy(), self._in_output[:num_distinct].copy()
        new: Counter[int] = Counter()
        for token_id in path:
            place = self._places.get(token_id)
            if place is None:
                new[token_id] += 1
            else:
                in_output[place] += 1
        if new:
            token_ids = np.append(token_ids, list(new))
            in_output = np.append(in_output, list(new.values()))
        return TokenCounts(token_ids, in_output)
