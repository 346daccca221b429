"""Jobs for drafters, told as the engine tells them: only what a drafter does not know already."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Draft, Drafter, DraftJob, DraftRequest


def draft_request(
    request_id: str = "r",
    num_prompt_tokens: int = 0,
    *,
    stop_token_ids: Sequence[int] = (),
    prediction: Sequence[int] = (),
) -> DraftRequest:
    return DraftRequest(
        request_id,
        num_prompt_tokens,
        SamplingParams(max_tokens=100),
        stop_token_ids=frozenset(stop_token_ids),
        prediction=tuple(prediction),
    )


class ToldSequence:
    """One sequence and what a drafter knows of it: committed tokens, then drafts."""

    def __init__(self, drafter: Drafter, prompt: Sequence[int], request: DraftRequest | None = None) -> None:
        self.drafter = drafter
        self.request = request or draft_request(num_prompt_tokens=len(prompt))
        self.committed = list(prompt)
        self.drafts: list[int] = []
        self._told = 0

    def commit(self, token_ids: Sequence[int]) -> None:
        """The target has drawn these: drafts that agree stay after them, others are dropped."""
        before = len(self.committed)
        num_equal = 0
        for draft, token_id in zip(self.drafts, token_ids, strict=False):
            if draft != token_id:
                break
            num_equal += 1
        self._told = min(self._told, before + num_equal)
        self.drafts = self.drafts[num_equal:] if num_equal == len(token_ids) else []
        self.committed += token_ids

    def redraft(self, num_kept: int, token_ids: Sequence[int]) -> None:
        """Another drafter goes on after so many of the drafts."""
        self._told = min(self._told, len(self.committed) + num_kept)
        self.drafts = self.drafts[:num_kept] + list(token_ids)

    def ask(self, num_wanted: int) -> Draft:
        """One job, and its answer on the end of the drafts."""
        known = self.committed + self.drafts
        first = min(self._told, len(known))
        job = DraftJob(self.request, 7, first, tuple(known[first:]), len(self.committed), num_wanted)
        (draft,) = self.drafter.draft([job]).drafts
        assert (draft.request_id, draft.epoch, draft.first) == (self.request.request_id, 7, len(known))
        self.drafts += draft.token_ids
        self._told = len(known) + len(draft.token_ids)
        return draft

    def retell(self, drafter: Drafter, num_wanted: int) -> Draft:
        """What a drafter answers that is told all of it at once."""
        known = tuple(self.committed + self.drafts)
        job = DraftJob(self.request, 7, 0, known, len(self.committed), num_wanted)
        drafter.close([self.request.request_id])
        return drafter.draft([job]).drafts[0]


def drafted(drafter: Drafter, tokens: Sequence[int], num_wanted: int = 8) -> list[int]:
    """What follows these committed tokens."""
    return list(ToldSequence(drafter, tokens).ask(num_wanted).token_ids)
