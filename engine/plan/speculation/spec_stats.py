"""SpecStats: what speculation did and gained, as plain numbers, for each request and for the server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

_RECENT = 0.5 ** (1 / 32)  # half of a round's weight in the recent acceptance is gone 32 rounds later


@dataclass(slots=True)
class RecentRatio:
    """A ratio of sums in which an entry has `keep` of its weight left after the next; 0 before the first."""

    keep: float
    part: float = 0.0
    whole: float = 0.0

    def observe(self, part: float, whole: float) -> None:
        """Add to both sums."""
        self.part = self.keep * self.part + part
        self.whole = self.keep * self.whole + whole

    @property
    def ratio(self) -> float:
        """Part over whole."""
        return self.part / self.whole if self.whole else 0.0


@dataclass(slots=True)
class SpecStats:
    """Running totals, never reset; loop thread only. A round verifies at least one draft of one request."""

    num_rounds: int = 0
    proposed: Counter[str] = field(default_factory=Counter)  # by method
    accepted: Counter[str] = field(default_factory=Counter)  # by method
    num_committed: int = 0  # by rounds: accepted, recovered and bonus tokens
    num_bonus: int = 0  # rounds that accepted all and went one further
    num_recovered: int = 0  # rounds in which the target put its own token for a rejected one
    accepted_per_position: list[int] = field(default_factory=list)  # rounds, by draft or depth
    acceptance_histogram: list[int] = field(default_factory=list)  # rounds that accepted exactly so many
    dropped: Counter[str] = field(default_factory=Counter)  # tokens: stale, cancelled, error, late
    run_ahead: Counter[str] = field(default_factory=Counter)  # hit, lane, miss
    num_fallbacks: int = 0  # steps of one token because the target cannot rewind
    num_late: int = 0  # answers
    num_stale: int = 0  # answers
    draft_s: float = 0.0
    verify_s: float = 0.0
    recent: RecentRatio = field(default_factory=lambda: RecentRatio(_RECENT))  # accepted over proposed

    def observe_round(self, method: str, num_proposed: int, num_accepted: int, num_committed: int) -> None:
        """Count one round. The request got `num_committed` tokens; fewer than accepted if it ended."""
        self.num_rounds += 1
        self.proposed[method] += num_proposed
        self.accepted[method] += num_accepted
        self.num_committed += num_committed
        if num_committed > num_accepted:
            if num_accepted == num_proposed:
                self.num_bonus += 1
            else:
                self.num_recovered += 1
        _lengthen(self.accepted_per_position, num_accepted)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
        _lengthen(self.acceptance_histogram, num_accepted + 1)
        self.acceptance_histogram[num_accepted] += 1
        self.recent.observe(num_accepted, num_proposed)

    def note_dropped(self, reason: str, num_tokens: int) -> None:
        """Count drafted tokens that were never verified."""
        self.dropped[reason] += num_tokens

    @property
    def num_proposed(self) -> int:
        """Drafts that were verified, by all methods."""
        return self.proposed.total()

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted, by all methods."""
        return self.accepted.total()

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed; 0 when nothing was proposed."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts a round, the figure vLLM reports; 0 before the first round."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    def add(self, other: SpecStats) -> None:
        """Count all of `other` here too. `other` is left as it is."""
        for name in (entry.name for entry in fields(self)):
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(more)
            elif isinstance(mine, list):
                _lengthen(mine, len(more))
                mine[: len(more)] = [a + b for a, b in zip(mine, more, strict=False)]
            elif isinstance(mine, RecentRatio):
                mine.part, mine.whole = mine.part + more.part, mine.whole + more.whole
            else:
                setattr(self, name, mine + more)


def _lengthen(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
