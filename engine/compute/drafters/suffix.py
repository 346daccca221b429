"""SuffixDrafter: goes on as the longest repeated end of a sequence went on before."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from engine.compute.drafters.known_tokens import KnownTokens
from engine.compute.drafters.suffix_automaton import Match, SuffixAutomaton
from engine.compute.drafters.text_source import Proposal, ReadAllowance, TextDrafter, match_chances
from engine.plan.speculation.drafter import DraftJob, DraftResult

MAX_TOKENS = 65_536  # that one sequence may index: 8 MB of ordinary text, 19 MB at worst
MIN_CHANCE = 0.1  # that all of a draft is right; how much of it is verified is for the length policy


class SuffixSource:
    """An automaton of the committed tokens. Past `max_tokens` it stays as it is, and goes on being matched.

    Drafts are walked through. Drafts are as long as is likely enough: about twice the match, less where the
    text went on in several ways (after Oliaro et al., "SuffixDecoding", 2025).
    """

    def __init__(self, allowance: ReadAllowance, max_tokens: int = MAX_TOKENS) -> None:
        self._allowance = allowance
        self._max_tokens = max_tokens
        self._start_anew(0)

    def _start_anew(self, revision: int) -> None:
        self._revision = revision
        self._automaton = SuffixAutomaton()
        self._num_read = 0
        self._match = Match(0, 0)  # of all that was read

    def propose(self, known: KnownTokens, num_wanted: int) -> Proposal:
        """Nothing while it has not read all that is committed."""
        if known.revision != self._revision:
            self._start_anew(known.revision)
        if self._num_read < known.num_committed:
            self._read(known)
            if self._num_read < known.num_committed:
                return Proposal([], 0, "suffix", is_behind=True)
        if num_wanted <= 0:
            return Proposal([], 0, "suffix")
        match = self._match
        num_drafts = known.num_drafts
        if num_drafts:
            match = self._automaton.follow(match, known.drafts())
        num_matched = match.length - num_drafts
        if num_matched <= 0:
            return Proposal([], 0, "suffix")
        chance = prod(match_chances(num_matched, num_drafts))  # about what it was when they were drafted
        found = self._automaton.continuation(match, num_wanted, chance, MIN_CHANCE)
        return Proposal(found.token_ids, num_matched, "suffix", chances=found.chances)

    def has_all(self, known: KnownTokens) -> bool:
        """Whether all that is committed is indexed, so that no other match can be longer."""
        return self._automaton.num_tokens == known.num_committed

    def _read(self, known: KnownTokens) -> None:
        count = self._allowance.take(known.num_committed - self._num_read)
        token_ids = known.committed(self._num_read, self._num_read + count)
        self._num_read += count
        room = self._max_tokens - self._automaton.num_tokens
        if room > 0:
            self._automaton.extend(token_ids[:room])
            self._match = self._automaton.longest_repeat()
        if room < count:
            self._match = self._automaton.follow(self._match, token_ids[max(0, room) :])


class SuffixDrafter:
    """A Drafter made of suffix automata, each held until its request is closed."""

    method = "suffix"
    is_cheap = True
    is_stepwise = False
    reads_features = False

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        allowance = ReadAllowance()
        self._drafter = TextDrafter(lambda request: SuffixSource(allowance, max_tokens), allowance)

    def draft(self, jobs: Sequence[DraftJob]) -> DraftResult:
        """See Drafter."""
        return self._drafter.draft(jobs)

    def close(self, request_ids: Sequence[str]) -> None:
        """See Drafter."""
        self._drafter.close(request_ids)
