"""PromptScores: the log-probabilities of a prompt's own tokens, which its first choice brings for all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engine import OutputDelta, TokenLogprobs


@dataclass(slots=True)
class PromptScores:
    """One record for each token of a prompt but its first. Its first choice brings them for all its choices.

    `known` is set once they are there, or will never come.
    """

    records: tuple[TokenLogprobs, ...] = ()
    known: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, delta: OutputDelta) -> None:
        """Take them from the first choice's output."""
        if delta.prompt_logprobs:
            self.records = delta.prompt_logprobs
        if delta.token_ids or delta.finish is not None:
            self.known.set()
