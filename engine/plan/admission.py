"""Admission: the bounded gate in front of the queue, passed before anything is tokenized."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from engine.plan.request import GenerationRequest, SamplingParams


class Permit:
    """Places taken in the queue while a request is being prepared; a context manager, released on leaving."""

    __slots__ = ("_admission", "_num_requests")

    def __init__(self, admission: Admission, num_requests: int) -> None:
        self._admission = admission
        self._num_requests = num_requests

    def release(self) -> None:
        """Give the places back; what was submitted is counted as waiting by then. Safe to call twice."""
        self._admission.num_preparing -= self._num_requests
        self._num_requests = 0

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Admission:
    """Bounds what waits, by requests and by prompt tokens. Loop thread only.

    `num_preparing` counts requests between their permit and the queue: being tokenized, mostly.
    `retry_after_s(n)` says in how many seconds n requests will have ended.
    """

    def __init__(
        self, max_queued_requests: int, max_queued_tokens: int, retry_after_s: Callable[[int], int]
    ) -> None:
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.num_preparing = 0
        self._retry_after_s = retry_after_s

    def admit(self, num_requests: int, num_waiting: int) -> Permit:
        """Take places for `num_requests`, or raise Overloaded naming the limit."""
        queued = num_waiting + self.num_preparing
        if queued + num_requests > self.max_queued_requests:
            raise Overloaded(
                f"The queue is full: {queued} requests wait, the limit is {self.max_queued_requests}.",
                code="queue_full",
                retry_after_s=self._retry_after_s(queued),
            )
        self.num_preparing += num_requests
        return Permit(self, num_requests)

    def check_tokens(self, num_tokens: int, num_waiting_tokens: int, num_waiting: int) -> None:
        """Raise Overloaded when a prompt of `num_tokens` overfills the queue; an empty queue takes any."""
        if num_waiting_tokens and num_waiting_tokens + num_tokens > self.max_queued_tokens:
            raise Overloaded(
                f"The queue is full: {num_waiting_tokens} prompt tokens wait, "
                f"the limit is {self.max_queued_tokens}.",
                code="queue_full",
                retry_after_s=self._retry_after_s(num_waiting),
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
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(
            f"The prompt holds a token id outside the vocabulary, which goes from 0 to {vocab_size - 1}.",
            param="prompt",
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
