"""Drafter: the protocol of every draft source, and its messages.

A drafter gets the known tokens by messages, and may be wrong, late or gone. Messages are frozen, so they may
cross threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.plan.request import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of a request beside its tokens; it never changes.

    `stop_token_ids` includes the model's EOS unless the request ignores it. `prediction` is the client's
    guess of the output, empty without one.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """The target's hidden state, a tensor [hidden], from which the token at `position` was drawn."""

    position: int
    hidden: object


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Continue one sequence by up to `num_wanted` tokens (0: only take the known ones).

    The sequence is what the drafter holds of it before position `first`, then `token_ids`. Its first
    `num_committed` tokens are final; the others are drafts, which a later job may replace. A drafter holds
    what it answered, so a job that agrees with the last answer repeats nothing of it. `features` is set if
    and only if the drafter reads them.
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
        """The position of the first drafted token."""
        return self.first + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's answer to one job: tokens for the positions from `first` on, none if it has no draft.

    `parents` None is a chain; else the drafts form a tree, and entry i is the index of the draft that draft i
    follows, below i, or -1 for the known tokens. `probs` has the distribution that each draft was drawn from,
    float32 [vocab], where verification needs it; empty means that each draft was certain. `is_behind` asks
    for another turn, because the drafter has more known tokens to read first. `method` names the source of
    the draft inside the drafter; "" is the drafter's own method.
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

    `method` labels it in the metrics. With `is_cheap` a call takes microseconds and may run on the event
    loop. With `is_stepwise` a job gives one token, or one tree, whatever it wants. With `reads_features` jobs
    carry them.
    """

    method: str
    is_cheap: bool
    is_stepwise: bool
    reads_features: bool

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """Run one micro-step for all jobs, at most one a request. May raise, which costs speed only."""

    def close(self, request_ids: Sequence[str]) -> None:
        """Forget these sequences and free their memory; unknown ones are passed over."""
