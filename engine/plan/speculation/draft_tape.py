"""DraftTape: the drafts that continue one request's known tokens. DraftedSequence: the request itself.

A late draft may still be right: only unequal tokens at one position start a new epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine.plan.request import Request
from engine.plan.speculation.acceptance import Acceptance, Kind
from engine.plan.speculation.drafter import Draft, DraftRequest, TargetFeatures
from engine.plan.step_records import NO_TOKEN, FeatureRows


class UnreadToken(NamedTuple):
    """Where a draft lies that the host has not read; see UnreadDrafts."""

    tokens: object
    place: int


class DraftedToken(NamedTuple):
    """One draft on a tape; NO_TOKEN while it is `unread`."""

    token_id: int
    parent: int | None = None  # the index of the draft before it, -1 for the known tokens; None in a chain
    probs: object | None = None  # that it was drawn from; None if it was certain
    chance: float | None = None  # that the drafter gave it, where the draft before it comes; None for no word
    unread: UnreadToken | None = None


class TapeOutcome(Enum):
    """How a tape compares with the committed tokens."""

    HIT = "hit"  # it had all of them: its other drafts are still good
    LATE = "late"  # it had only the first: what the drafter is working on may still be good
    LANE = "lane"  # they disagree, and there are drafts for what came instead
    MISS = "miss"  # they disagree


@dataclass(slots=True, eq=False)
class DraftTape:
    """Drafts for the positions where the known tokens end.

    `epoch` rises when drafts turn out wrong. A tape holds a chain, which may grow, or a tree, which may not.
    Beside a chain it keeps drafts for other outcomes, by position and token.
    """

    epoch: int = 0
    method: str = ""  # that made its first draft
    drafted: list[DraftedToken] = field(default_factory=list)
    lanes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.drafted)

    @property
    def is_tree(self) -> bool:
        """True if the drafts form a tree."""
        return bool(self.drafted) and self.drafted[0].parent is not None

    def expect(self, unread: Sequence[UnreadToken], method: str) -> None:
        """Take drafts that are still to be read; `withdraw` comes before the answer with them."""
        if not self.drafted:
            self.method = method
        self.drafted += [DraftedToken(NO_TOKEN, unread=each) for each in unread]

    def withdraw(self) -> None:
        """Drop what is still to be read."""
        while self.drafted and self.drafted[-1].unread is not None:
            self.drafted.pop()

    def drop_drafts(self) -> None:
        """Drop the drafts, and start a new epoch: answers to earlier jobs are stale."""
        self.drafted.clear()
        self.lanes.clear()
        self.epoch += 1

    def put(self, draft: Draft, known: Sequence[int], method: str) -> int | None:
        """Take a drafter's answer; None if it is of an older epoch or at odds with what is known.

        `known` are all the tokens of the request. Of a late answer only the part past them is kept, if the
        rest agrees with them. Returns how many drafts were right and came too late.
        """
        if draft.epoch != self.epoch:
            return None
        drafted = _drafted_tokens(draft)
        num_late = max(0, min(len(known) - draft.first, len(drafted)))
        if num_late:
            rest = _after(drafted, known[draft.first :])
            if rest is None:
                self.epoch += 1
                return None
            drafted = rest
        elif draft.first != len(known) + len(self.drafted):
            return None
        if self.drafted and drafted and (self.is_tree or drafted[0].parent is not None):
            return None
        if not self.drafted:
            self.method = method
        self.drafted += drafted
        self.lanes = {(lane.position, lane.token_ids[0]): lane.token_ids[1:] for lane in draft.lanes}
        return num_late

    def commit(self, committed: Sequence[int], first: int = 0) -> tuple[TapeOutcome, int]:
        """Move past the tokens, at least one, that the target has drawn for the positions from `first` on.

        Returns the outcome and how many of the tokens the chain had. A tree is dropped whole: nothing is
        drafted after a tree.
        """
        if self.is_tree:
            self.drafted.clear()
            return TapeOutcome.LATE, 0
        num_equal = len(accepted_drafts(self.drafted, committed))
        if num_equal == len(committed):
            del self.drafted[:num_equal]
            return TapeOutcome.HIT, num_equal
        outcome = TapeOutcome.LATE if num_equal == len(self.drafted) else TapeOutcome.MISS
        lane: tuple[int, ...] = ()
        if num_equal + 1 == len(committed):
            lane = self.lanes.get((first + num_equal, committed[-1]), ())
        outcome = TapeOutcome.LANE if lane else outcome
        self.drafted = list(map(DraftedToken, lane))
        self.lanes.clear()
        self.epoch += outcome in (TapeOutcome.MISS, TapeOutcome.LANE)
        return outcome, num_equal


def accepted_drafts(drafted: Sequence[DraftedToken], tokens: Sequence[int]) -> list[int]:
    """The indices of the drafts that `tokens` begin with, along one path from the root."""
    accepted: list[int] = []
    for token_id in tokens:
        found = _child(drafted, accepted[-1] if accepted else -1, token_id)
        if found is None:
            break
        accepted.append(found)
    return accepted


def num_levels(drafted: Sequence[DraftedToken]) -> int:
    """The most drafts that follow one another."""
    levels: list[int] = []
    for index, draft in enumerate(drafted):
        before = index - 1 if draft.parent is None else draft.parent
        levels.append(1 + levels[before] if before >= 0 else 1)
    return max(levels, default=0)


def stated_chances(drafted: Sequence[DraftedToken]) -> list[float]:
    """The chance of each draft and all before it, by the drafter's word, never increasing.

    Empty where any has none, or was sampled: which sampled drafts are verified must not depend on them.
    """
    stated: list[float] = []
    for index, draft in enumerate(drafted):
        if draft.chance is None or draft.probs is not None:
            return []
        before = index - 1 if draft.parent is None else draft.parent
        chance = draft.chance * (stated[before] if before >= 0 else 1.0)
        stated.append(min(chance, stated[-1]) if stated else chance)
    return stated


def _child(drafted: Sequence[DraftedToken], root: int, token_id: int) -> int | None:
    """The draft that follows `root` with this token; the first of equal siblings."""
    if not drafted or drafted[0].parent is None:
        index = root + 1
        return index if index < len(drafted) and drafted[index].token_id == token_id else None
    found = (i for i, draft in enumerate(drafted) if draft.parent == root and draft.token_id == token_id)
    return next(found, None)


def _drafted_tokens(draft: Draft) -> list[DraftedToken]:
    num_tokens = len(draft.token_ids)
    parents = draft.parents or (None,) * num_tokens
    probs = draft.probs or (None,) * num_tokens
    chances = draft.chances or (None,) * num_tokens
    return list(map(DraftedToken, draft.token_ids, parents, probs, chances))


def _after(drafted: list[DraftedToken], known: Sequence[int]) -> list[DraftedToken] | None:
    """The drafts that follow once these tokens, at least one, are known; None if they disagree with them."""
    path = accepted_drafts(drafted, known)
    if drafted[0].parent is None:
        return drafted[len(known) :] if len(path) == min(len(known), len(drafted)) else None
    if len(path) < len(known):
        return None
    place = {path[-1]: -1}  # of each draft below the last known token, in the shortened tree
    below: list[DraftedToken] = []
    for index, draft in enumerate(drafted):
        if draft.parent in place:
            place[index] = len(below)
            below.append(draft._replace(parent=place[draft.parent]))
    return below


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
    num_vain: int = 0  # answers since one of its drafts was accepted last
    num_passed: int = 0  # steps since it was due last

    def forget(self) -> None:
        """The drafter holds nothing of the sequence from now on."""
        self.num_synced, self.no_draft_at, self.is_behind, self.num_turns = 0, -1, False, 0

    def unsync(self, position: int) -> None:
        """The drafter's tokens from `position` on are not those of the sequence, nor what it made of them."""
        self.num_synced = min(self.num_synced, position)
        if self.no_draft_at > position:
            self.no_draft_at = -1


class NewFeatures:
    """What the target left and no drafter was given yet: of the newest `limit` tokens, or a few more.

    Tokens count as they were computed, refused drafts among them: rows that are kept hold the memory of all
    that their step computed of the sequence.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # As TargetFeatures, one behind the other, and the tokens that were computed for each.
        self._runs: deque[tuple[int, FeatureRows, int]] = deque()
        self._num_behind = 0  # of these tokens, those of all runs but the oldest
        self._given: TargetFeatures | None = None  # the newest that was taken

    @property
    def position(self) -> int:
        """That of the token which the newest row drew; -1 without any that is new."""
        return self._runs[-1][0] if self._runs else -1

    def reach(self, position: int) -> bool:
        """True if the newest row, taken or not, drew the token at this position."""
        newest = self.position
        if newest < 0 and self._given is not None:
            newest = self._given.position
        return newest == position

    def add(self, position: int, rows: FeatureRows, num_computed: int) -> None:
        """Keep what comes right behind the others; the token at `position` was drawn from its last row.

        The step computed `num_computed` tokens of the sequence.
        """
        runs = self._runs
        self._num_behind += num_computed if runs else 0
        runs.append((position, rows, num_computed))
        while self._num_behind >= self._limit:
            runs.popleft()
            self._num_behind -= runs[0][2]

    def take(self) -> tuple[TargetFeatures, ...]:
        """All of them, oldest first; none is new any longer."""
        taken = tuple(TargetFeatures(position, rows) for position, rows, _ in self._runs)
        self._drop_runs()
        self._given = taken[-1] if taken else self._given
        return taken

    def take_again(self) -> tuple[TargetFeatures, ...]:
        """As `take`; without any that are new, those that were taken last."""
        return self.take() or (() if self._given is None else (self._given,))

    def clear(self) -> None:
        """Forget them all."""
        self._drop_runs()
        self._given = None

    def _drop_runs(self) -> None:
        self._runs.clear()
        self._num_behind = 0


@dataclass(slots=True)
class DraftedSequence:
    """One request that drafts are made for, and its tape."""

    request: Request
    about: DraftRequest
    tape: DraftTape
    views: dict[int, DraftView]  # of the drafters that may draft for it, by the place of their links
    features: NewFeatures
    num_in_flight: int = 0  # first drafts of the tape that are being verified
    author: DraftView | None = None  # whose drafts the tape holds, or held last
    is_given_up: bool = False  # it is not to be drafted for again

    @property
    def draft_kind(self) -> Kind:
        """Of the drafts that the tape holds."""
        return self.tape.method, self.request.sampling.temperature > 0

    @property
    def num_known(self) -> int:
        """Tokens up to the end of the tape."""
        return len(self.request.token_ids) + len(self.tape)

    @property
    def has_new_features(self) -> bool:
        """True if it has the features of its newest token, and no drafts after that token yet."""
        is_new = self.features.position == len(self.request.token_ids) - 1
        return is_new and not self.tape.drafted

    @property
    def has_features(self) -> bool:
        """True if it has those of its newest token, or a drafter was given them."""
        return self.features.reach(len(self.request.token_ids) - 1)

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
