"""Admission: the bounded gate in front of the queue, passed before anything is tokenized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from engine.plan.request import GenerationRequest, Request, SamplingParams
from engine.plan.scheduling.request_queue import RequestQueue

TENANT_SHARE = 7 / 8  # of the queue's places, that one of several tenants may have


class Weighed(Protocol):
    """What waits: a request, or the texts of one."""

    @property
    def tenant(self) -> str | None:
        """Whose it is."""

    @property
    def num_tokens(self) -> int:
        """How much of it waits."""


class WeighedQueue(Protocol):
    """Where it waits; `num_tokens` are those of all."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Weighed]: ...
    @property
    def num_tokens(self) -> int:
        """See above."""


@dataclass(slots=True, eq=False)
class Admission:
    """Bounds what waits, by requests and by prompt tokens. Loop thread only."""

    max_queued_requests: int
    max_queued_tokens: int
    retry_after_s: Callable[[int], int]  # in how many seconds so many requests will have ended
    has_tenants: bool = False  # several: none of them may have all places
    preparing: Counter[str | None] = field(default_factory=Counter)  # by tenant; see `num_preparing`

    @property
    def num_preparing(self) -> int:
        """Requests between their permit and the queue: being tokenized, mostly."""
        return self.preparing.total()

    def admit(
        self, num_requests: int, waiting: RequestQueue | Sequence[Request], tenant: str | None = None
    ) -> ExitStack:
        """Take places until the stack is closed; raise Overloaded, naming the limit, if too few are left."""
        queued = len(waiting) + self.num_preparing
        own = chain((self.preparing[tenant],), (request.tenant == tenant for request in waiting))
        self._check(num_requests, "requests", queued, own, self.max_queued_requests, queued)
        self.preparing[tenant] += num_requests
        permit = ExitStack()
        permit.callback(self._give_back, num_requests, tenant)
        return permit

    def check_tokens(self, records: Sequence[Weighed], queue: WeighedQueue) -> None:
        """Raise Overloaded when one reply's prompts overfill the queue; an empty queue takes any one."""
        if records and len(records) + len(queue) > 1:
            num_tokens, tenant = sum(record.num_tokens for record in records), records[0].tenant
            own = (request.num_tokens for request in queue if request.tenant == tenant)
            limit = self.max_queued_tokens
            self._check(num_tokens, "prompt tokens", queue.num_tokens, own, limit, len(queue))

    def _check(
        self, asked: int, what: str, queued: int, own: Iterable[int], limit: int, num_waiting: int
    ) -> None:
        """Raise Overloaded where all have too many of something, or one of several tenants has too many."""
        if queued + asked <= limit:
            limit = max(1, int(limit * TENANT_SHARE)) if self.has_tenants else limit
            if queued + asked <= limit or not (queued := sum(own)) or queued + asked <= limit:
                return
        message = f"The queue is full: {queued} {what} wait, the limit is {limit}."
        raise Overloaded(message, code="queue_full", retry_after_s=self.retry_after_s(num_waiting))

    def _give_back(self, num_requests: int, tenant: str | None) -> None:
        self.preparing[tenant] -= num_requests
        if not self.preparing[tenant]:
            del self.preparing[tenant]


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
