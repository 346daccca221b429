"""DraftedSequence: one request that drafts are made for, and the state of each drafter for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.plan.request import Request
from engine.plan.speculation.acceptance import Acceptance
from engine.plan.speculation.draft_tape import DraftTape
from engine.plan.speculation.drafter import DraftRequest, TargetFeatures


@dataclass(slots=True)
class DraftView:
    """The state of one drafter for one sequence."""

    acceptance: Acceptance
    max_tokens: int  # the longest draft it may make
    limit: int  # the length worth having
    num_synced: int = 0  # first tokens that the drafter holds, drafts included; 0 also if it is to close them
    no_draft_at: int = -1  # tokens known when it last answered without a draft
    is_behind: bool = False  # it has known tokens left to read
    num_turns: int = 0  # in a row in which it answered so, without drafts

    def forget(self) -> None:
        """The drafter holds nothing of the sequence from now on."""
        self.num_synced, self.no_draft_at, self.is_behind, self.num_turns = 0, -1, False, 0

    def unsync(self, position: int) -> None:
        """The drafter's tokens from `position` on are not those of the sequence."""
        self.num_synced = min(self.num_synced, position)


@dataclass(slots=True)
class DraftedSequence:
    """One request that drafts are made for, and its tape."""

    request: Request
    about: DraftRequest
    tape: DraftTape
    views: dict[int, DraftView]  # of the drafters that may draft for it, by the place of their links
    num_in_flight: int = 0  # first drafts of the tape that are being verified
    features: TargetFeatures | None = None  # None where no drafter reads them
    author: DraftView | None = None  # whose drafts the tape holds, or held last

    @property
    def num_known(self) -> int:
        """Tokens up to the end of the tape."""
        return len(self.request.token_ids) + len(self.tape)

    @property
    def has_new_features(self) -> bool:
        """True if it has the features of its newest token, and no drafts after that token yet."""
        features = self.features
        is_new = features is not None and features.position == len(self.request.token_ids) - 1
        return is_new and not self.tape.drafted

    def expects_drafts(self, awaited: Collection[int]) -> bool:
        """True if it has drafts, or one of the awaited drafters is worth asking for some."""
        views = self.views.items()
        return bool(self.tape.drafted) or any(view.limit > 0 and index in awaited for index, view in views)

    def num_offered(self, room: int) -> int:
        """How many drafts, up to `room`, there are to choose from for the next step.

        Whether a sampled draft is verified must not depend on its value, or the committed tokens follow
        another distribution. So a chain of sampled drafts counts as long as was asked for, wherever it ends
        or leaves the grammar; `num_verified` cuts it once the choice is made.
        """
        if self._is_sampled:
            return 0 if self.author is None else min(self.author.limit, room)
        return self._num_allowed(min(len(self.tape), room))

    def num_verified(self, num_chosen: int) -> int:
        """How many of the first drafts go into a step when `num_chosen` of those offered were chosen.

        A draft behind a forbidden one is never verified. A forbidden draft that was certain is left out, too;
        one that was sampled is verified: it is rejected, and the residual is drawn from.
        """
        num_drafts = min(len(self.tape), num_chosen)
        if not self._is_sampled:
            return num_drafts
        num_allowed = self._num_allowed(num_drafts)
        is_met = num_allowed < num_drafts and self.tape.drafted[num_allowed].probs is not None
        return num_allowed + is_met

    @property
    def _is_sampled(self) -> bool:
        """True for a chain with any draft that was sampled."""
        return not self.tape.is_tree and any(draft.probs is not None for draft in self.tape.drafted)

    def _num_allowed(self, num_drafts: int) -> int:
        """How many of the first drafts the request's grammar allows.

        A tree is left whole, because what the grammar forbids is never accepted anyway. A dear grammar allows
        none: each draft would cost more than it saves.
        """
        grammar = self.request.grammar
        if grammar is None or num_drafts < 1:
            return num_drafts
        if grammar.is_dear:
            return 0
        if self.tape.is_tree:
            return num_drafts
        return grammar.num_valid([draft.token_id for draft in self.tape.drafted[:num_drafts]])
