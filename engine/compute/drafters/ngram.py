"""NgramDrafter: copies what followed the last few tokens when they occurred before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.compute.drafters.known_tokens import KnownTokens
from engine.compute.drafters.text_source import Proposal, ReadAllowance, TextDrafter, match_chances
from engine.plan.speculation.drafter import DraftJob, DraftResult

MIN_MATCH, MAX_MATCH = 2, 5
_GOOD_MATCH = 4  # shorter ones are drafted for one token less
_MAX_SCANNED = 32_768  # tokens looked back at, 15 µs


class NgramSource:
    """Looks for the last `max_match` committed tokens and all drafts after them.

    Failing that for fewer, down to `min_match`. Of several places the last one counts, and a draft is no
    longer than what agrees before it. Nothing is indexed: a look takes 2 µs, 6 µs among 8192 tokens.
    """

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
        """Short drafts for short matches: two or three common words say little about what follows."""
        if num_wanted <= 0 or known.num_tokens <= self._min_match:
            return Proposal([], 0, "ngram")
        text = known.view[-_MAX_SCANNED:]
        num_drafts = known.num_drafts
        end, length = last_occurrence(text, self._max_match + num_drafts)
        if length >= self._max_match + num_drafts:
            length += num_equal_before(text, end - length, len(text) - length, num_wanted)
        num_matched = length - num_drafts
        if num_matched < self._min_match:
            return Proposal([], 0, "ngram")
        limit = max(1, num_matched - (num_matched < _GOOD_MATCH)) - num_drafts
        source = known.num_tokens - len(text) + end
        token_ids = known.copy_from(source, max(0, min(num_wanted, limit)))
        return Proposal(token_ids, num_matched, "ngram", chances=match_chances(length, len(token_ids)))


def last_occurrence(text: npt.NDArray[np.int32], max_length: int) -> tuple[int, int]:
    """Where the longest suffix of at most `max_length` tokens last ended before the end, and its length."""
    last = len(text) - 1
    ends = (text[:last] == text[last]).nonzero()[0]
    length, end = 0, 0
    while len(ends) and length < max_length:
        length, end = length + 1, int(ends[-1]) + 1
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
    return end, length


def num_equal_before(text: npt.NDArray[np.int32], first: int, second: int, most: int) -> int:
    """How many tokens right before the two positions are the same, up to `most`; `first` is the earlier."""
    count = min(first, most)
    differs = (text[first - count : first] != text[second - count : second])[::-1]
    return int(differs.argmax()) if differs.any() else count


class NgramDrafter:
    """A Drafter made of n-grams; it holds 4 bytes a token."""

    method = "ngram"
    is_cheap = True
    is_stepwise = False
    reads_features = False

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._drafter = TextDrafter(lambda request: NgramSource(min_match, max_match), ReadAllowance())

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        return self._drafter.draft(jobs)

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        self._drafter.close(request_ids)
