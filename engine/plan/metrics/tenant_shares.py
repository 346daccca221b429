"""TenantShares: whose tokens the server has been computing of late, as shares of all."""

from __future__ import annotations

import math
from collections.abc import Callable

HORIZON_S = 60.0
MAX_SHOWN = 16
OTHERS = "other"
ANONYMOUS = "anonymous"
_MAX_KEPT = 256


class TenantShares:
    """Tokens of each tenant's ended requests, decayed so that the last minute counts most. O(1) a request.

    Amounts are kept as if counted at one fixed time, so that decay is one growing factor for new ones.
    """

    def __init__(self, clock: Callable[[], float], horizon_s: float = HORIZON_S) -> None:
        self._clock = clock
        self._horizon_s = horizon_s
        self._origin = clock()
        self._tokens: dict[str, float] = {}

    def count(self, tenant: str | None, num_tokens: int) -> None:
        """A request of this tenant has ended with so many tokens; None is the anonymous tenant."""
        name = ANONYMOUS if tenant is None else tenant
        elapsed = (self._clock() - self._origin) / self._horizon_s
        if elapsed > _MAX_KEPT:
            self._rebase(elapsed)
            elapsed = 0.0
        self._tokens[name] = self._tokens.get(name, 0.0) + num_tokens * math.exp(elapsed)
        if len(self._tokens) > _MAX_KEPT:
            del self._tokens[min(self._tokens, key=self._tokens.__getitem__)]

    def shares(self) -> dict[str, float]:
        """Each tenant's share, the largest MAX_SHOWN by name and the rest as OTHERS; their sum is 1, or 0."""
        total = sum(self._tokens.values())
        if total <= 0:
            return {ANONYMOUS: 0.0}
        ranked = sorted(self._tokens, key=self._tokens.__getitem__, reverse=True)
        shares = {name: self._tokens[name] / total for name in ranked[:MAX_SHOWN]}
        if ranked[MAX_SHOWN:]:
            shares[OTHERS] = sum(self._tokens[name] for name in ranked[MAX_SHOWN:]) / total
        return shares

    def _rebase(self, elapsed: float) -> None:
        factor = math.exp(-elapsed)
        self._origin = self._clock()
        self._tokens = {name: tokens * factor for name, tokens in self._tokens.items()}
