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
    """What one drafter has to do with one sequence.

    `told` is how many leading tokens it knows to be as they are, drafts included; 0 if it holds nothing of
    the sequence, or is about to forget it. `silent_at` is how many were known when it last had nothing to
    say. `max_tokens` is the longest draft it may make, and `limit` how long a draft is worth having. It
    `is_behind` while it has known tokens to read, and has said so, without drafts, `num_turns` times.
    """

    acceptance: Acceptance
    max_tokens: int
    limit: int
    told: int = 0
    silent_at: int = -1
    is_behind: bool = False
    num_turns: int = 0

    def forget(self) -> None:
        """The drafter will know nothing of the sequence."""
        self.told, self.silent_at, self.is_behind, self.num_turns = 0, -1, False, 0


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

    def num_offered(self, room: int) -> int:
        """How many drafts, up to `room`, there are to choose from for the next step.

        Whether a sampled draft is verified must not depend on what it is, or what is committed has another
        law. So a chain of sampled drafts counts as long as was asked for, wherever it ends or leaves the
        grammar; `num_verified` sees to that once the choice is made.
        """
        if self._is_sampled:
            return 0 if self.author is None else min(self.author.limit, room)
        return self._num_allowed(min(len(self.tape), room))

    def num_verified(self, num_chosen: int) -> int:
        """How many of the first drafts go into a step when `num_chosen` of those offered were chosen.

        None that follow one which the grammar forbids. That one itself costs a row for nothing if it was
        certain, but if it was sampled it must be verified: it is refused, and leaves its residual.
        """
        num_drafts = min(len(self.tape), num_chosen)
        if not self._is_sampled:
            return num_drafts
        num_allowed = self._num_allowed(num_drafts)
        is_met = num_allowed < num_drafts and self.tape.drafted[num_allowed].probs is not None
        return num_allowed + is_met

    @property
    def _is_sampled(self) -> bool:
        """True for a chain of which any draft was drawn by chance."""
        return not self.tape.is_tree and any(draft.probs is not None for draft in self.tape.drafted)

    def _num_allowed(self, num_drafts: int) -> int:
        """How many of the first drafts the request's grammar allows.

        A tree is left whole: whatever of it is not allowed is never accepted. Where the grammar is dear, each
        draft would cost more than it saves.
        """
        grammar = self.request.grammar
        if grammar is None or num_drafts < 1:
            return num_drafts
        if grammar.is_dear:
            return 0
        if self.tape.is_tree:
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
