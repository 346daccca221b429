"""Log-probabilities of a prompt's own tokens: who brings them, and a reply that consists of nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from engine import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    RequestStream,
    SamplingParams,
    SpeculationOptions,
    TokenLogprobs,
)


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


def scoring_request(request: GenerationRequest) -> GenerationRequest:
    """A request that scores a prompt of two tokens or more, and generates nothing.

    Its last token is "drawn" from that token alone: so a prompt that fills the whole context fits too.
    """
    *prompt, last = request.prompt_token_ids
    number = request.sampling.prompt_logprobs
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        allowed_token_ids=(last,),
        logprobs=number,
        prompt_logprobs=number,
    )
    return replace(
        request, prompt_token_ids=prompt, sampling=sampling, speculation=SpeculationOptions(enabled=False)
    )


class ScoresOnly:
    """The stream of a `scoring_request` as one of a request for no tokens: a single delta with the scores."""

    def __init__(self, stream: RequestStream, num_prompt_tokens: int) -> None:
        self._stream = stream
        self._num_prompt_tokens = num_prompt_tokens
        self._records: list[TokenLogprobs] = []

    def __aiter__(self) -> ScoresOnly:
        """Itself."""
        return self

    async def __anext__(self) -> OutputDelta:
        """The terminal delta, once. Cancelling the wait loses nothing."""
        async for delta in self._stream:
            self._records += (*delta.prompt_logprobs, *delta.logprobs)
            if delta.finish is None:
                continue
            finish = replace(
                delta.finish, num_prompt_tokens=self._num_prompt_tokens, num_output_tokens=0, stop_reason=None
            )
            if finish.reason is FinishReason.STOP:
                finish = replace(finish, reason=FinishReason.LENGTH)
            return OutputDelta("", (), (), finish, tuple(self._records))
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        self._stream.close()
