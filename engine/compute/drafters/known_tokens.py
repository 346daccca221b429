"""KnownTokens: the tokens of one sequence that jobs have synced, packed, for drafters that read them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.plan.speculation.drafter import DraftJob

_FIRST_CAPACITY = 256


class KnownTokens:
    """The tokens of one sequence, 4 bytes each: the committed ones, then drafts.

    `revision` rises when committed tokens change, which happens only when a sequence begins anew: what was
    derived from the old ones is worthless then.
    """

    __slots__ = ("_tokens", "num_committed", "num_tokens", "revision")

    def __init__(self) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(_FIRST_CAPACITY, np.int32)
        self.num_tokens = 0
        self.num_committed = 0
        self.revision = 0

    @property
    def num_drafts(self) -> int:
        """How many of the tokens are drafts."""
        return self.num_tokens - self.num_committed

    @property
    def view(self) -> npt.NDArray[np.int32]:
        """All tokens; valid until the next change."""
        return self._tokens[: self.num_tokens]

    def sync(self, job: DraftJob) -> bool:
        """Take the tokens of a job; False, and nothing changes, if it leaves out unknown tokens."""
        if job.first > self.num_tokens:
            return False
        end = job.next_position
        num_committed = min(job.num_committed, end)
        if job.first < self.num_committed and not self._is_unchanged(job, num_committed):
            self.revision += 1
        self.num_tokens = job.first
        if job.token_ids:
            self.append(job.token_ids)
        self.num_committed = num_committed
        return True

    def _is_unchanged(self, job: DraftJob, num_committed: int) -> bool:
        """Whether a job that begins within the committed tokens leaves them as they are."""
        if num_committed < self.num_committed:
            return False
        again = job.token_ids[: self.num_committed - job.first]
        return self.committed(job.first, self.num_committed) == list(again)

    def append(self, token_ids: tuple[int, ...] | list[int]) -> None:
        """Add tokens, as drafts."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), np.int32)
            grown[: self.num_tokens] = self.view
            self._tokens = grown
        self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def committed(self, first: int, end: int) -> list[int]:
        """The committed tokens in [first, end)."""
        token_ids: list[int] = self._tokens[first : min(end, self.num_committed)].tolist()
        return token_ids

    def drafts(self) -> list[int]:
        """The tokens that are not committed."""
        token_ids: list[int] = self._tokens[self.num_committed : self.num_tokens].tolist()
        return token_ids

    def repeats(self, num_tokens: int) -> bool:
        """Whether the last so many tokens stand in the text before, too; not with drafts behind them."""
        first = self.num_committed - num_tokens
        if first < 0 or self.num_drafts:
            return False
        return (
            self._tokens[first : self.num_committed].tobytes()
            in self._tokens[: self.num_committed - 1].tobytes()
        )

    def copy_from(self, source: int, count: int) -> list[int]:
        """`count` tokens from position `source` on; past the end the copies themselves are copied."""
        tokens: list[int] = self._tokens[source : min(source + count, self.num_tokens)].tolist()
        while len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens
