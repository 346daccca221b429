"""PredictionDrafter: follows the output that the caller expects, and finds its place again after an edit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.compute.drafters.known_tokens import KnownTokens
from engine.compute.drafters.text_source import Proposal, ReadAllowance, TextDrafter, match_chances
from engine.plan.speculation.drafter import DraftJob, DraftRequest, DraftResult

MAX_TOKENS = 32_768  # of a prediction that are looked at: 8 ms to index them, once, when output differs
MIN_MATCH = 2  # tokens that must agree to go on near the place where output and prediction parted
FAR_MATCH = 4  # and anywhere else
NEAR_TOKENS = 32
LENGTH_PER_MATCH = 4  # drafts for each token that agreed in a row
_MAX_MATCH = 8
_MAX_PLACES = 16  # looked at on each side of where they parted


class Alignment(NamedTuple):
    """Where output and prediction stand to each other.

    The next output token is expected to be the one at `place` of the prediction, after `num_matched` in a
    row that agreed; 0 means that they parted there, and the last two output tokens are kept to find on.
    """

    place: int
    num_matched: int
    last: tuple[int, ...] = ()


class Prediction:
    """The expected output and how to follow it; never written once it is indexed."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids[:MAX_TOKENS])
        self._places: dict[tuple[int, ...], list[int]] | None = None  # behind each pair of tokens

    def start(self) -> Alignment:
        """Before any output: the caller's word counts like a long match."""
        return Alignment(0, _MAX_MATCH)

    def follow(self, alignment: Alignment, output: Iterable[int]) -> Alignment:
        """The alignment after more output."""
        place, num_matched, last = alignment
        expected = self._token_ids
        for token_id in output:
            last = (*last[1 - _MAX_MATCH :], token_id)
            if num_matched and place < len(expected) and expected[place] == token_id:
                place += 1
                num_matched += 1
            else:
                place, num_matched = self._find(place, last)
        return Alignment(place, num_matched, last)

    def after(self, alignment: Alignment, num_wanted: int) -> list[int]:
        """What the prediction goes on with, while they are aligned."""
        return (
            self._token_ids[alignment.place : alignment.place + num_wanted] if alignment.num_matched else []
        )

    def _find(self, parted: int, last: tuple[int, ...]) -> tuple[int, int]:
        """The place behind the longest match of the last output, of several the one closest to `parted`.

        `(parted, 0)` if there is none.
        """
        if self._places is None:
            self._places = _pairs(self._token_ids)
        best = (0, 0, parted)
        places = self._places.get(last[-2:], [])
        middle = bisect_left(places, parted)
        for place in places[max(0, middle - _MAX_PLACES) : middle + _MAX_PLACES]:
            num_matched = self._num_matched(place, last)
            distance = abs(place - parted)
            if num_matched >= (MIN_MATCH if distance <= NEAR_TOKENS else FAR_MATCH):
                best = max(best, (num_matched, -distance, place))
        return best[2], best[0]

    def _num_matched(self, place: int, last: tuple[int, ...]) -> int:
        """How many of the last output tokens stand before this place, two at least."""
        count = 2
        while count < min(len(last), place) and self._token_ids[place - count - 1] == last[-count - 1]:
            count += 1
        return count


def _pairs(token_ids: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """The places behind each pair of neighbours."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index in range(1, len(token_ids)):
        places.setdefault((token_ids[index - 1], token_ids[index]), []).append(index + 1)
    return places


class PredictionSource:
    """Follows one request's prediction through the committed output, then through the drafts."""

    def __init__(self, request: DraftRequest) -> None:
        self._num_prompt_tokens = request.num_prompt_tokens
        self._prediction = Prediction(request.prediction)
        self._start_anew(0)

    def _start_anew(self, revision: int) -> None:
        self._revision = revision
        self._num_read = self._num_prompt_tokens
        self._alignment = self._prediction.start()

    def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
        """What the prediction goes on with: a few tokens after a short match, then as many as wanted."""
        if known.revision != self._revision:
            self._start_anew(known.revision)
        if self._num_read < known.num_committed:
            output = known.committed(self._num_read, known.num_committed)
            self._alignment = self._prediction.follow(self._alignment, output)
            self._num_read = known.num_committed
        if num_wanted <= 0 or known.num_tokens < self._num_prompt_tokens:
            return Proposal([], 0, "prediction")
        alignment = self._alignment
        num_drafts = known.num_drafts
        if num_drafts:
            alignment = self._prediction.follow(alignment, known.drafts())
        num_matched = alignment.num_matched - num_drafts
        if num_matched <= 0:
            return Proposal([], 0, "prediction")
        limit = LENGTH_PER_MATCH * num_matched - num_drafts
        token_ids = self._prediction.after(alignment, max(0, min(num_wanted, limit)))
        chances = match_chances(num_matched + num_drafts, len(token_ids))
        return Proposal(token_ids, num_matched, "prediction", chances=chances)


class PredictionDrafter:
    """A Drafter made of the callers' predictions; requests without one get nothing."""

    method = "prediction"
    is_cheap = True
    is_stepwise = False
    reads_features = False

    def __init__(self) -> None:
        self._drafter = TextDrafter(PredictionSource, ReadAllowance())

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        return self._drafter.draft(jobs)

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        self._drafter.close(request_ids)
