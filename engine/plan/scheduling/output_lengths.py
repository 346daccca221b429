"""OutputLengths: how long replies have been, for estimates of those to come."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.metrics.histogram import Histogram
from engine.plan.request import Request

_BOUNDS = tuple(float(bound) for bound in sorted({round(1.2**step) for step in range(70)}))  # up to 290,000
_KNOWN = 32  # replies, before anything is said of the next
_MAX_KINDS = 512  # of replies that are told apart
_FORGET_AT = 4096  # replies of a kind; half of each count is forgotten then

Kind = tuple[str | None, ...]  # (tenant, endpoint) of a reply, (endpoint,) of all tenants', or () of all


class OutputLengths:
    """The output tokens of served replies, by tenant and endpoint.

    Where a tenant has too few from an endpoint, all tenants' from there count, and where those are too few,
    too, all replies. One that its `max_tokens` cut off counts as long as it was. Loop thread only.
    """

    def __init__(self) -> None:
        self._by_kind: dict[Kind, Histogram] = {}

    def observe(self, request: Request) -> None:
        """A reply has ended by itself or by its length."""
        for kind in reversed(_kinds(request)):  # the widest finds room
            if kind not in self._by_kind and len(self._by_kind) < _MAX_KINDS:
                self._by_kind[kind] = Histogram(_BOUNDS)
            lengths = self._by_kind.get(kind)
            if lengths is not None:
                lengths.observe(request.num_output_tokens)
                if lengths.count >= _FORGET_AT:
                    lengths.counts = [count // 2 for count in lengths.counts]

    def remaining(self, request: Request, share: float, *, only_own: bool = False) -> int:
        """Tokens that a reply is still to get: with a probability of `share` no more, by what was served.

        At least what it cannot end without, at most what it may have; 1 or more. With `only_own` nothing is
        concluded from the replies of others: a tenant refused for their length would never show its own.
        """
        so_far, least = request.num_output_tokens, request.least_output_tokens
        most = request.sampling.max_tokens
        lengths = self._known(_kinds(request)[:1] if only_own else _kinds(request))
        if least < most and lengths is not None:
            least = max(least, int(_beyond(lengths, so_far).quantile(share)))
        return max(1, min(least, most) - so_far)

    def _known(self, kinds: Sequence[Kind]) -> Histogram | None:
        """The lengths of the first kind that is known; None while none is."""
        found = map(self._by_kind.get, kinds)
        return next((lengths for lengths in found if lengths is not None and lengths.count >= _KNOWN), None)


def _kinds(request: Request) -> tuple[Kind, ...]:
    """The kinds that a reply is of, the narrowest first."""
    return ((request.tenant, request.endpoint), (request.endpoint,), ())


def _beyond(lengths: Histogram, so_far: int) -> Histogram:
    """The longer ones of them, as far as the buckets tell."""
    longer = Histogram(lengths.bounds)
    longer.counts = [
        count * (index == len(lengths.bounds) or lengths.bounds[index] > so_far)
        for index, count in enumerate(lengths.counts)
    ]
    return longer
