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

    def unsync(self, position: int) -> None:
        """The drafter's tokens from `position` on are not those of the sequence."""
        self.num_synced = min(self.num_synced, position)


@dataclass(slots=True)
class DraftedSequence:
    """One request that drafts are made for, and its tape.

    The first `num_in_flight` drafts of the tape are being verified. `views` are those of the drafters that
    may draft for it, by the place of their links. `author` is the view whose drafts the tape holds, or held
    last. `features` are None where no drafter reads them.
    """

    request: Request
    about: DraftRequest
    tape: DraftTape
    views: dict[int, DraftView]
    num_in_flight: int = 0
    features: TargetFeatures | None = None
    author: DraftView | None = None

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
