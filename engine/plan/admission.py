"""Admission: the bounded gate in front of the queue, passed before anything is tokenized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from engine.plan.request import GenerationRequest, Request, RequestStatus, SamplingParams

TENANT_SHARE = 7 / 8  # of the queue's places, that one of several tenants may have


class Weighed(Protocol):
    """What waits: a request, or the texts of one."""

    @property
    def tenant(self) -> str | None:
        """Whose it is."""

    @property
    def num_tokens(self) -> int:
        """How much of it waits."""


@dataclass(frozen=True, slots=True)
class Places:
    """How much of something there is, for all and for one tenant, and who has how much of it."""

    what: str
    limit: int
    held: Counter[str | None]
    size: Callable[[Weighed], int]
    num_waiting: int  # requests


@dataclass(slots=True, eq=False)
class Admission:
    """Bounds what waits, by requests and by prompt tokens. Loop thread only.

    In a full queue a tenant that has less than its share takes the places of those that have more, and any
    takes those of its own that are less urgent. What gives way has not started: the least urgent, the newest
    of them. `reply_of` gives the waiting requests of the reply that one belongs to, none once any of them has
    started, and `displace` ends them with an error; without these nothing gives way.
    """

    max_queued_requests: int
    max_queued_tokens: int
    retry_after_s: Callable[[int], int]  # in how many seconds so many requests will have ended
    has_tenants: bool = False  # several: none of them may have all places
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants in the shares; 1 by default
    reply_of: Callable[[Request], Sequence[Request]] = lambda _: ()
    displace: Callable[[Request, Overloaded], None] = lambda *_: None
    preparing: Counter[str | None] = field(default_factory=Counter)  # by tenant; see `num_preparing`

    @property
    def num_preparing(self) -> int:
        """Requests between their permit and the queue: being tokenized, mostly."""
        return self.preparing.total()

    def admit(
        self,
        num_requests: int,
        waiting: Iterable[Request],
        tenant: str | None = None,
        priority: int = 0,
    ) -> ExitStack:
        """Take places until the stack is closed; raise Overloaded, naming the limit, if too few are left."""
        held = Counter(request.tenant for request in waiting)
        held += self.preparing
        places = Places("requests", self.max_queued_requests, held, lambda _: 1, held.total())
        self._take(num_requests, places, waiting, tenant, priority)
        self.preparing[tenant] += num_requests
        permit = ExitStack()
        permit.callback(self._give_back, num_requests, tenant)
        return permit

    def check_tokens(self, records: Sequence[Weighed], queue: Iterable[Weighed], priority: int = 0) -> None:
        """Raise Overloaded when one reply's prompts overfill the queue; an empty queue takes any one.

        InvalidRequest for several that no empty queue would take.
        """
        waiting = list(queue)
        if records and len(records) + len(waiting) > 1:
            held: Counter[str | None] = Counter()
            for request in waiting:
                held[request.tenant] += request.num_tokens
            num_tokens = sum(record.num_tokens for record in records)
            limit, what = self.max_queued_tokens, "prompt tokens"
            if len(records) > 1 and num_tokens > limit:
                reason = f"The {len(records)} generations asked for at once have {num_tokens} prompt tokens"
                raise InvalidRequest(f"{reason}; the queue holds {limit}.", param="prompt")
            places = Places(what, limit, held, lambda each: each.num_tokens, len(waiting))
            self._take(num_tokens, places, waiting, records[0].tenant, priority)

    def _take(
        self, asked: int, places: Places, waiting: Iterable[Weighed], tenant: str | None, priority: int
    ) -> None:
        """Raise Overloaded where all have too much of something, or one of several tenants has too much."""
        queued, own, limit = places.held.total(), places.held[tenant], places.limit
        own_limit = max(1, int(limit * TENANT_SHARE)) if self.has_tenants else limit
        if own and queued + asked > own_limit and own + asked > own_limit:
            raise self._full(f"{own} {places.what} wait, the limit is {own_limit}.", places)
        if queued + asked <= limit:
            return
        victims = self._victims(asked, places, waiting, tenant, priority)
        if victims is None:
            raise self._full(f"{queued} {places.what} wait, the limit is {limit}.", places)
        for victim in victims:
            why = "a request with fewer beside it, or of a better priority, took this one's place."
            self.displace(victim, self._full(why, places))

    def _victims(
        self, asked: int, places: Places, waiting: Iterable[Weighed], tenant: str | None, priority: int
    ) -> list[Request] | None:
        """Whom to displace so that it fits; None if too few may be."""
        held = places.held.copy()
        held[tenant] += asked
        whole = sum(map(self._weight, held))
        shares = {name: places.limit * self._weight(name) / whole for name in held}
        by_tenant: dict[str | None, list[Request]] = {}
        for request in waiting:
            if isinstance(request, Request) and request.status is RequestStatus.WAITING:
                by_tenant.setdefault(request.tenant, []).append(request)
        for requests in by_tenant.values():
            requests.sort(key=lambda request: (request.priority, request.arrival))
        chosen: dict[str, Request] = {}
        while held.total() > places.limit:
            over = [name for name in by_tenant if name != tenant and held[name] > shares[name]]
            if over and held[tenant] <= shares[tenant]:
                name = max(over, key=lambda each: held[each] / shares[each])
            elif tenant in by_tenant and by_tenant[tenant][-1].priority > priority:
                name = tenant
            else:
                return None
            victim = by_tenant[name].pop()
            if not by_tenant[name]:
                del by_tenant[name]
            for request in () if victim.request_id in chosen else self.reply_of(victim):
                chosen[request.request_id] = request
                held[name] -= places.size(request)
        return list(chosen.values())

    def _weight(self, tenant: str | None) -> float:
        return self.weights.get(tenant or "", 1.0)

    def _full(self, why: str, places: Places) -> Overloaded:
        retry_after_s = self.retry_after_s(places.num_waiting)
        return Overloaded(f"The queue is full: {why}", code="queue_full", retry_after_s=retry_after_s)

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
