"""NgramDrafter: copies what followed the last few tokens when they occurred before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.speculation.drafter import DraftJob, DraftResult
from engine.speculation.drafters.known_tokens import KnownTokens
from engine.speculation.drafters.text_source import Proposal, ReadAllowance, TextDrafter

MIN_MATCH, MAX_MATCH = 2, 5
_MAX_SCANNED = 32_768  # tokens looked back at: 12 µs


class NgramSource:
    """Looks for the last `max_match` committed tokens, or fewer down to `min_match`, and all drafts after them.

    Of several places the last one counts. Nothing is indexed: a look takes 4 µs, 12 µs in a long text.
    """

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
        """Short drafts for short matches."""
        if num_wanted <= 0 or known.num_tokens <= self._min_match:
            return Proposal([], 0, "ngram")
        text = known.view[-_MAX_SCANNED:]
        num_drafts = known.num_drafts
        end, length = last_occurrence(text, self._max_match + num_drafts)
        num_matched = length - num_drafts
        if num_matched < self._min_match:
            return Proposal([], 0, "ngram")
        if num_matched < self._max_match:
            num_wanted = min(num_wanted, 2 ** (num_matched - 1) - num_drafts)
        source = known.num_tokens - len(text) + end
        return Proposal(known.copy_from(source, max(0, num_wanted)), num_matched, "ngram")


def last_occurrence(text: npt.NDArray[np.int32], max_length: int) -> tuple[int, int]:
    """Where the longest suffix of at most `max_length` tokens last ended before the end, and its length."""
    last = len(text) - 1
    ends = (text[:last] == text[last]).nonzero()[0]
    length = 0
    while len(ends) and length < max_length:
        found = ends
        length += 1
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[last - length]]
    return (int(found[-1]) + 1, length) if length else (0, 0)


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
