"""ReplySteps: in how many steps replies were generated, for estimates of those to come."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.plan.metrics.histogram import Histogram
from engine.plan.request import FinishReason, Request

_BOUNDS = tuple(float(bound) for bound in sorted({round(1.2**step) for step in range(70)}))  # up to 290,000
_PACES = tuple(1.05**step for step in range(80))  # up to 47 tokens a step
_KNOWN = 32  # replies, before anything is said of the next
_MAX_KINDS = 1024  # of replies that are told apart
_FORGET_AT = 4096  # replies of a kind; half of each count is forgotten then

# (tenant, endpoint, size of max_tokens), (tenant, endpoint), (endpoint,) or (), which is all.
Kind = tuple[str | int | None, ...]
_NUM_OWN = 2  # kinds of a reply that hold its tenant's alone


class _Replies:
    """Served replies of one kind."""

    def __init__(self) -> None:
        self.steps = Histogram(_BOUNDS)
        self.paces = Histogram(_PACES)  # tokens a step
        self.is_known = False  # True once there are enough to judge the next by
        self._found: dict[tuple[float, int], float] = {}  # quantiles, until the next reply

    def observe(self, num_tokens: float, num_steps: float) -> None:
        """One more; what is old counts less in time."""
        self._found.clear()
        self.steps.observe(num_steps)
        self.paces.observe(num_tokens / num_steps)
        self.is_known = self.is_known or self.steps.count >= _KNOWN
        if self.steps.count >= _FORGET_AT:
            for histogram in (self.steps, self.paces):
                histogram.counts = [count // 2 for count in histogram.counts]

    def pace(self, share: float) -> float:
        """Tokens a step, at least; with a probability of `share` no fewer."""
        key = share, -1
        if key not in self._found:
            self._found[key] = max(1.0, self.paces.quantile(1 - share))
        return self._found[key]

    def steps_beyond(self, so_far: int, share: float) -> float:
        """The steps of those that took more than `so_far`, as far as the buckets tell: as many of them."""
        bucket = bisect_right(self.steps.bounds, so_far)  # the first whose bound is above
        key = share, bucket
        if key not in self._found:
            longer = Histogram(self.steps.bounds)
            longer.counts[bucket:] = self.steps.counts[bucket:]
            self._found[key] = longer.quantile(share)
        return self._found[key]


class ReplySteps:
    """The steps that replies took, by tenant, endpoint and size of `max_tokens`; drafts make them fewer.

    Where a kind has too few, the wider ones count: the tenant's from that endpoint, all tenants', all
    replies. One that its `max_tokens` cut off counts as it was; one that its deadline did as what half of
    those as long come to, or the long ones would never be counted. Loop thread only.
    """

    def __init__(self) -> None:
        self._by_kind: dict[Kind, _Replies] = {}

    def observe(self, request: Request) -> None:
        """A reply has ended by itself, by its length, or by its deadline while it ran."""
        num_tokens, num_steps = float(request.num_output_tokens), float(max(1, request.num_token_steps))
        if request.finish_reason is FinishReason.DEADLINE:
            more = self.remaining(request, 0.5)
            num_tokens, num_steps = num_tokens * (1 + more / num_steps), num_steps + more
        for kind in reversed(_kinds(request)):  # the widest finds room
            if kind not in self._by_kind and len(self._by_kind) < _MAX_KINDS:
                self._by_kind[kind] = _Replies()
            if (replies := self._by_kind.get(kind)) is not None:
                replies.observe(num_tokens, num_steps)

    def remaining(
        self, request: Request, share: float, pace: float = 1.0, *, only_own: bool = False
    ) -> float:
        """Steps that a reply still takes: with a probability of `share` no more, by what was served.

        At least what it cannot end without, at most a step for each token that it may have; 1 or more. `pace`
        is how many tokens a step gives while no reply is known. With `only_own` nothing is concluded from the
        replies of others: a tenant refused for them would never show its own.
        """
        kinds = _kinds(request)
        replies = self._known(kinds[:_NUM_OWN] if only_own else kinds)
        if replies is not None:
            pace = replies.pace(share)
        num_tokens, so_far = request.num_output_tokens, request.num_token_steps
        most = request.sampling.max_tokens - num_tokens
        steps = (request.least_output_tokens - num_tokens) / pace
        if replies is not None and request.least_output_tokens < request.sampling.max_tokens:
            steps = max(steps, replies.steps_beyond(so_far, share) - so_far)
        return max(1.0, min(steps, most))

    def _known(self, kinds: Sequence[Kind]) -> _Replies | None:
        """The replies of the first kind that is known; None while none is."""
        found = map(self._by_kind.get, kinds)
        return next((replies for replies in found if replies is not None and replies.is_known), None)


def _kinds(request: Request) -> tuple[Kind, ...]:
    """The kinds that a reply is of, the narrowest first."""
    tenant, endpoint = request.tenant, request.endpoint
    return ((tenant, endpoint, request.sampling.max_tokens.bit_length()), (tenant, endpoint), (endpoint,), ())
