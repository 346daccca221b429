"""DraftedSequence: one request that drafts are made for, and how each drafter stands to it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.request import Request
from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.draft_tape import DraftTape
from engine.plan.speculation.drafter import DraftRequest, TargetFeatures

_KEEP = 0.98  # of an entry's weight, with each entry after it


@dataclass(slots=True)
class DraftView:
    """The state of one drafter for one sequence.

    The drafter holds the first `num_synced` tokens as they are, drafts included; 0 if it holds none, or is
    about to close the sequence. It last answered without a draft when `no_draft_at` tokens were known.
    `max_tokens` is the longest draft it may make, `limit` the length worth having. It `is_behind` while it
    has known tokens left to read; it has answered so, without drafts, `num_turns` times in a row.
    """

    acceptance: Acceptance
    max_tokens: int
    limit: int
    num_synced: int = 0
    no_draft_at: int = -1
    is_behind: bool = False
    num_turns: int = 0

    def forget(self) -> None:
        """The drafter holds nothing of the sequence from now on."""
        self.num_synced, self.no_draft_at, self.is_behind, self.num_turns = 0, -1, False, 0


@dataclass(slots=True)
class DraftedSequence:
    """One request, and its tape, of which `num_flying` drafts are being verified.

    `views` has the drafters that may draft for it, by their places. The `author` is the view whose drafts the
    tape holds, or held last.
    """

    request: Request
    about: DraftRequest
    tape: DraftTape
    views: dict[int, DraftView]
    num_flying: int = 0
    features: TargetFeatures | None = None
    author: DraftView | None = None

    @property
    def num_known(self) -> int:
        """Tokens up to the end of the tape."""
        return len(self.request.token_ids) + len(self.tape)

    @property
    def has_new_features(self) -> bool:
        """True if it has what the target left for its newest token, and nothing is drafted after that yet."""
        features = self.features
        is_new = features is not None and features.position == len(self.request.token_ids) - 1
        return is_new and not self.tape.drafted

    def expects_drafts(self, awaited: frozenset[int]) -> bool:
        """True if it has drafts, or the next step waits for those of a drafter that is worth asking."""
        views = self.views.items()
        return bool(self.tape.drafted) or any(view.limit > 0 and index in awaited for index, view in views)

    def num_allowed(self, num_drafts: int) -> int:
        """How many of the first drafts the request's grammar allows: others would cost a pass for nothing.

        A tree is left whole: whatever of it is not allowed is never accepted.
        """
        grammar = self.request.grammar
        if grammar is None or num_drafts < 1 or self.tape.is_tree:
            return num_drafts
        return grammar.num_valid([draft.token_id for draft in self.tape.drafted[:num_drafts]])


class RecentRatio:
    """A ratio of sums, in which an entry counts less the longer ago it was; 0 before the first."""

    __slots__ = ("_part", "_whole")

    def __init__(self) -> None:
        self._part = self._whole = 0.0

    def observe(self, part: float, whole: float) -> None:
        """Add to both sums."""
        self._part = _KEEP * self._part + part
        self._whole = _KEEP * self._whole + whole

    @property
    def ratio(self) -> float:
        """Part over whole."""
        return self._part / self._whole if self._whole else 0.0
