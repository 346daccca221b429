"""OutputLengths: how long replies have been, for estimates of those to come."""

from __future__ import annotations

from engine.plan.metrics.histogram import Histogram
from engine.plan.request import Request

_BOUNDS = tuple(float(bound) for bound in sorted({round(1.2**step) for step in range(70)}))  # up to 290,000
_KNOWN = 32  # replies, before anything is said of the next
_MAX_TENANTS = 256  # that are told apart; the others are all as one
_FORGET_AT = 4096  # replies of a tenant; half of each count is forgotten then


class OutputLengths:
    """The output tokens of served replies, by tenant, and of all together where a tenant has too few.

    A reply that its `max_tokens` cut off counts as long as it was. Loop thread only.
    """

    def __init__(self) -> None:
        self._of_all = Histogram(_BOUNDS)
        self._by_tenant: dict[str | None, Histogram] = {}

    def observe(self, request: Request) -> None:
        """A reply has ended by itself or by its length."""
        if request.tenant not in self._by_tenant and len(self._by_tenant) < _MAX_TENANTS:
            self._by_tenant[request.tenant] = Histogram(_BOUNDS)
        for lengths in (self._of_all, self._by_tenant.get(request.tenant)):
            if lengths is not None:
                lengths.observe(request.num_output_tokens)
                if lengths.count >= _FORGET_AT:
                    lengths.counts = [count // 2 for count in lengths.counts]

    def remaining(self, request: Request, share: float) -> int:
        """Tokens that a reply is still to get: with a probability of `share` no more, by what was served.

        At least what it cannot end without, at most what it may have; 1 or more.
        """
        so_far, least = request.num_output_tokens, request.least_output_tokens
        most = request.sampling.max_tokens
        lengths = self._by_tenant.get(request.tenant)
        if lengths is None or lengths.count < _KNOWN:
            lengths = self._of_all
        if least < most and lengths.count >= _KNOWN:
            least = max(least, int(_beyond(lengths, so_far).quantile(share)))
        return max(1, min(least, most) - so_far)


def _beyond(lengths: Histogram, so_far: int) -> Histogram:
    """The longer ones of them, as far as the buckets tell."""
    longer = Histogram(lengths.bounds)
    longer.counts = [
        count * (index == len(lengths.bounds) or lengths.bounds[index] > so_far)
        for index, count in enumerate(lengths.counts)
    ]
    return longer
