"""ModelFreeDrafter: asks the sources that need no weights, and lets the one that is surest speak."""

from __future__ import annotations

from collections.abc import Sequence

from engine.compute.drafters.known_tokens import KnownTokens
from engine.compute.drafters.ngram import NgramSource
from engine.compute.drafters.prediction import PredictionSource
from engine.compute.drafters.suffix import SuffixSource
from engine.compute.drafters.text_source import Proposal, ReadAllowance, TextDrafter
from engine.plan.speculation.drafter import DraftJob, DraftRequest, DraftResult


class ModelFreeSource:
    """The caller's prediction while output follows it; else the suffix automaton, or the n-grams.

    N-grams are asked only where they can know more than the automaton: while it has not read all, or cannot.
    """

    def __init__(self, request: DraftRequest, allowance: ReadAllowance) -> None:
        self._prediction = PredictionSource(request) if request.prediction else None
        self._suffix = SuffixSource(allowance)
        self._ngram = NgramSource()

    def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
        """Of the automaton and the n-grams, the one with the longer match."""
        suffix = self._suffix.propose(known, num_wanted)
        if self._prediction is not None:
            prediction = self._prediction.propose(known, num_wanted)
            if prediction.token_ids:
                return prediction._replace(is_behind=suffix.is_behind)
        if self._suffix.has_all(known):
            return suffix
        ngram = self._ngram.propose(known, num_wanted)
        if ngram.num_matched > suffix.num_matched:
            return ngram._replace(is_behind=suffix.is_behind)
        return suffix


class ModelFreeDrafter:
    """A Drafter made of all of them; each draft names the one it comes from."""

    method = "model_free"
    is_cheap = True
    is_stepwise = False
    reads_features = False

    def __init__(self) -> None:
        allowance = ReadAllowance()
        self._drafter = TextDrafter(lambda request: ModelFreeSource(request, allowance), allowance)

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        return self._drafter.draft(jobs)

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        self._drafter.close(request_ids)
