"""TenantShares: whose tokens the server has been computing of late, as shares of all."""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_SHOWN = 16
OTHERS = "other"
ANONYMOUS = "anonymous"
_HORIZON_S = 60.0
_MAX_KEPT = 256


class TenantShares:
    """Tokens of each tenant's ended requests, decayed so that the last minute counts most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counted_at = clock()
        self._tokens: dict[str, float] = {}

    def count(self, tenant: str | None, num_tokens: int) -> None:
        """A request of this tenant has ended with so many tokens; None is the anonymous tenant."""
        now = self._clock()
        kept = math.exp((self._counted_at - now) / _HORIZON_S)
        self._counted_at = now
        tokens = {name: kept * amount for name, amount in self._tokens.items()}
        name = ANONYMOUS if tenant is None else tenant
        tokens[name] = tokens.get(name, 0.0) + num_tokens
        if len(tokens) > _MAX_KEPT:
            del tokens[min(tokens, key=tokens.__getitem__)]
        self._tokens = tokens

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
