"""Drafter: what every draft source is, and the messages it gets and gives.

The loop is the only writer of what is known; a drafter is told of it and may be wrong, late or gone. Messages
are frozen, so they may cross threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.plan.request import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of a request beside its tokens; constant while it lives.

    `stop_token_ids` includes the model's EOS unless the request ignores it. `prediction` is the caller's own
    guess of the output, empty without one.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What the target's pass left for one sequence: the row that the token at `position` was drawn from.

    `hidden` is a tensor [hidden], what its output projection read.
    """

    position: int
    hidden: object


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Continue one sequence by up to `num_wanted` tokens (0: only take note of what is known).

    The sequence is what the drafter knew of it before position `first`, then `token_ids`. Its first
    `num_committed` tokens are final; those behind are drafts, which a later job may replace. What a drafter
    answers counts as known to it, so a job that agrees with the last answer has nothing to tell. `features`
    is None unless the drafter reads them, and then never.
    """

    request: DraftRequest
    epoch: int
    first: int
    token_ids: tuple[int, ...]
    num_committed: int
    num_wanted: int
    features: TargetFeatures | None = None

    @property
    def next_position(self) -> int:
        """Where the first drafted token goes."""
        return self.first + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's answer to one job: tokens for the positions from `first` on, none if it has no idea.

    `parents` None is a chain; else drafts form a tree, and entry i is the index of the draft that draft i
    follows, always below i, -1 for those that follow the known tokens. `probs` holds the distribution each
    draft was drawn from, as float32 [vocab], when verification needs it; empty means that each was certain.
    `is_behind` asks for another turn: the drafter has more of the known tokens to read first. `method` says
    which of a drafter's sources spoke; "" for its own.
    """

    request_id: str
    epoch: int
    first: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    probs: tuple[object, ...] = ()
    is_behind: bool = False
    method: str = ""


@dataclass(frozen=True, slots=True)
class DraftResult:
    """The answers of one micro-step and the seconds it took."""

    drafts: tuple[Draft, ...]
    draft_s: float


class Drafter(Protocol):
    """A draft source for many sequences. Its methods are called one at a time, by one thread at a time.

    `method` labels it in the metrics. `is_cheap` says that a call takes microseconds, so that it may run on
    the event loop. `is_stepwise` says that a job gives one token, or a tree, whatever it wants, and more
    come by asking again. `reads_features` asks for them.
    """

    method: str
    is_cheap: bool
    is_stepwise: bool
    reads_features: bool

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """One micro-step for all jobs, at most one a request. May raise: it costs speed only."""
        ...

    def close(self, request_ids: Sequence[str]) -> None:
        """Forget these sequences and free what they hold; unknown ones are passed over."""
        ...
