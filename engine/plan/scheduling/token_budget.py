"""TokenBudget: what one step may still compute."""

from __future__ import annotations


class TokenBudget:
    """Counts down one step's tokens: in all, for prefill, for decodes (one token each), for drafts."""

    __slots__ = (
        "_max_decodes",
        "_max_prefill",
        "_max_tokens",
        "num_decode_tokens",
        "num_draft_tokens",
        "num_prefill_tokens",
    )

    def __init__(self, max_tokens: int, max_prefill: int, max_decodes: int) -> None:
        self._max_tokens = max_tokens
        self._max_prefill = max_prefill
        self._max_decodes = max_decodes
        self.num_decode_tokens = 0
        self.num_prefill_tokens = 0
        self.num_draft_tokens = 0

    @property
    def prefill_left(self) -> int:
        """Tokens that prefill chunks may still take."""
        spent = self.num_decode_tokens + self.num_prefill_tokens
        return min(self._max_prefill - self.num_prefill_tokens, self._max_tokens - spent)

    def decode_limit(self, reserved: int) -> int:
        """How many sequences may decode when `reserved` tokens are kept for prefill. Before any is taken."""
        return min(self._max_decodes, self._max_tokens - reserved)

    def take_decodes(self, num_seqs: int) -> None:
        """Spend one token for each decoding sequence, within `decode_limit`."""
        self.num_decode_tokens += num_seqs

    def limit_others(self, num_tokens: int) -> None:
        """Let prefill and drafts together take at most that many beside the decodes, which were taken."""
        self._max_tokens = min(self._max_tokens, self.num_decode_tokens + num_tokens)

    def take_chunk(self, wanted: int) -> int:
        """Spend up to `wanted` tokens on one prefill chunk; how many it got."""
        granted = min(wanted, self.prefill_left)
        self.num_prefill_tokens += granted
        return granted

    @property
    def drafts_left(self) -> int:
        """Tokens that drafts may still take, once decodes and prefill have theirs."""
        return self._max_tokens - self.num_decode_tokens - self.num_prefill_tokens - self.num_draft_tokens

    def take_drafts(self, num_tokens: int) -> None:
        """Spend that many on drafts, within `drafts_left`."""
        self.num_draft_tokens += num_tokens
