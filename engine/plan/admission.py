"""Admission: the bounded gate in front of the queue, passed before anything is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from engine.plan.request import GenerationRequest, SamplingParams


@dataclass(slots=True, eq=False)
class Admission:
    """Bounds what waits, by requests and by prompt tokens. Loop thread only."""

    max_queued_requests: int
    max_queued_tokens: int
    retry_after_s: Callable[[int], int]  # in how many seconds so many requests will have ended
    num_preparing: int = 0  # requests between their permit and the queue: being tokenized, mostly

    def admit(self, num_requests: int, num_waiting: int) -> ExitStack:
        """Take places until the stack is closed; raise Overloaded, naming the limit, if too few are left."""
        queued = num_waiting + self.num_preparing
        if queued + num_requests > self.max_queued_requests:
            raise Overloaded(
                f"The queue is full: {queued} requests wait, the limit is {self.max_queued_requests}.",
                code="queue_full",
                retry_after_s=self.retry_after_s(queued),
            )
        self.num_preparing += num_requests
        permit = ExitStack()
        permit.callback(self._give_back, num_requests)
        return permit

    def _give_back(self, num_requests: int) -> None:
        self.num_preparing -= num_requests

    def check_tokens(self, num_tokens: int, num_waiting_tokens: int, num_waiting: int) -> None:
        """Raise Overloaded when a prompt of `num_tokens` overfills the queue; an empty queue takes any."""
        if num_waiting_tokens and num_waiting_tokens + num_tokens > self.max_queued_tokens:
            raise Overloaded(
                f"The queue is full: {num_waiting_tokens} prompt tokens wait, "
                f"the limit is {self.max_queued_tokens}.",
                code="queue_full",
                retry_after_s=self.retry_after_s(num_waiting),
            )


def check_prompt(request: GenerationRequest, max_model_len: int, vocab_size: int) -> None:
    """Raise InvalidRequest unless the prompt is non-empty, in the vocabulary, and fits with max_tokens."""
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
    if len(prompt) + max_tokens > max_model_len:
        raise ContextLengthExceeded(
            limit=max_model_len,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            param="prompt" if len(prompt) >= max_model_len else "max_tokens",
        )
    check_token_ids("prompt", prompt, vocab_size)


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest when an id in the request's field `param` is outside the vocabulary."""
    least, most = min(token_ids, default=0), max(token_ids, default=0)
    if least < 0 or most >= vocab_size:
        worst = least if least < 0 else most
        raise InvalidRequest(
            f"'{param}' holds the token id {worst}; ids go from 0 to {vocab_size - 1}.", param=param
        )


def check_choice_of_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> None:
    """Raise InvalidRequest when what is banned from the start leaves none of the allowed tokens."""
    if sampling.allowed_token_ids is None:
        return
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned |= sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
    if all(token_id in banned for token_id in sampling.allowed_token_ids):  # mostly the first is not
        raise InvalidRequest(
            "'allowed_token_ids' holds only tokens that 'bad_words' or 'min_tokens' forbids.",
            param="allowed_token_ids",
        )
