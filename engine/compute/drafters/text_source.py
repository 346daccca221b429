"""TextSource: finds how one sequence may go on in text that is known; TextDrafter: a Drafter made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from engine.compute.drafters.known_tokens import KnownTokens
from engine.compute.drafters.suffix_automaton import ESCAPE
from engine.plan.speculation.drafter import Draft, DraftJob, DraftRequest, DraftResult

READ_PIECE = 2048  # tokens of long texts that one call reads: below 10 ms at 4 µs a token
QUIET_MATCH = 4  # tokens that must stand in the text already, to ask a quiet sequence's source
READ_SHARE = 64  # and what each sequence may read in any case, so that a long text holds up no other


class Proposal(NamedTuple):
    """How a sequence may go on; no tokens for no idea.

    `num_matched` is how many committed tokens before them are found in the text they come from. `is_behind`
    says that there is more to read. `chances` are as in Draft.
    """

    token_ids: list[int]
    num_matched: int
    method: str
    is_behind: bool = False
    chances: Sequence[float] = ()


def match_chances(num_matched: int, count: int) -> list[float]:
    """How likely each of `count` tokens is that follow a match of so many, seen once; see ESCAPE."""
    return [max(0.0, 1.0 - ESCAPE / (num_matched + place)) for place in range(count)]


class TextSource(Protocol):
    """One sequence's source of drafts. It may remember what is committed, never what is drafted.

    What it proposes depends on the tokens alone, not on how jobs were cut.
    """

    def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
        """At most `num_wanted` tokens to follow the known ones."""
        ...


@dataclass(slots=True)
class ReadAllowance:
    """How many more tokens this call may read into indexes; shared by all sequences of a drafter."""

    left: int = READ_PIECE

    def take(self, num_unread: int) -> int:
        """How many of so many tokens may be read now."""
        count = min(num_unread, max(self.left, READ_SHARE))
        self.left -= count
        return count


@dataclass(slots=True)
class _Sequence:
    source: TextSource
    known: KnownTokens = field(default_factory=KnownTokens)


class TextDrafter:
    """Keeps the sequences that jobs sync and asks the source of each; the other half of a Drafter.

    A draft ends with the first token that stops its request. A job that leaves out tokens that are not known
    gets no answer. What is new of a quiet sequence is not read before its end repeats a few tokens.
    """

    def __init__(self, open_source: Callable[[DraftRequest], TextSource], allowance: ReadAllowance) -> None:
        self._open_source = open_source
        self._allowance = allowance
        self._sequences: dict[str, _Sequence] = {}

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """Answers in the order of the jobs."""
        start = perf_counter()
        self._allowance.left = READ_PIECE
        drafts = []
        for job in jobs:
            sequence = self._sequences.get(job.request.request_id)
            if sequence is None:
                if job.first:
                    continue
                sequence = _Sequence(self._open_source(job.request))
                self._sequences[job.request.request_id] = sequence
            if not sequence.known.sync(job):
                continue
            if _is_idle(job, sequence.known):
                drafts.append(Draft(job.request.request_id, job.epoch, job.next_position, ()))
            else:
                drafts.append(_answer(job, sequence))
        return DraftResult(tuple(drafts), perf_counter() - start)

    def close(self, request_ids: Sequence[str]) -> None:
        """Forget these sequences and all that was read of them."""
        for request_id in request_ids:
            self._sequences.pop(request_id, None)


def _is_idle(job: DraftJob, known: KnownTokens) -> bool:
    """True for a quiet sequence whose end is new to it; what a caller predicts is looked at in any case."""
    return job.is_quiet and not job.request.prediction and not known.repeats(QUIET_MATCH)


def _answer(job: DraftJob, sequence: _Sequence) -> Draft:
    known = sequence.known
    stops = job.request.stop_token_ids
    has_ended = known.num_drafts > 0 and int(known.view[-1]) in stops
    proposal = sequence.source.propose(known, 0 if has_ended else job.num_wanted)
    token_ids = proposal.token_ids
    if token_ids:
        if not stops.isdisjoint(token_ids):
            del token_ids[1 + next(i for i, token_id in enumerate(token_ids) if token_id in stops) :]
        known.append(token_ids)
    chances = tuple(proposal.chances[: len(token_ids)])
    return Draft(
        request_id=job.request.request_id,
        epoch=job.epoch,
        first=job.next_position,
        token_ids=tuple(token_ids),
        is_behind=proposal.is_behind,
        method=proposal.method,
        chances=chances,
    )
