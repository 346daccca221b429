"""VirtualCounters: how many weighted tokens each tenant was served, so that the least served goes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import StartRefused
from engine.plan.scheduling.rising_heap import RisingHeap


@dataclass(frozen=True, slots=True)
class FairnessWeights:
    """What a computed prompt token and an output token cost, and each tenant's share (1 if not named).

    A tenant of weight 2 gets twice the service of one of weight 1 while both have work. All must be above 0;
    StartRefused otherwise.
    """

    prompt: float = 1.0
    output: float = 2.0
    tenants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {"prompt": self.prompt, "output": self.output, **self.tenants}
        for name, weight in named.items():
            if not weight > 0:
                raise StartRefused(f"The fairness weight of {name!r} is {weight}: it must be above 0.")


class VirtualCounters:
    """The Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    A tenant's counter grows by the weighted tokens computed for it over its weight, each token once, however
    often preemption has it computed. A tenant that had nobody waiting and comes back is lifted to the least
    counter among those that wait (to the last one's that left, if nobody does): it has saved up no credit.
    Lifts are kept as one `floor` that never falls: whoever does not wait counts as being there at least, and
    needs no counter of his own up to there.

    Let admission always take from the waiting tenant with the least counter. Between two tenants that both
    have requests waiting all the time, the service over any interval then differs by at most
    2 * max(w_prompt * L, w_output * M), where L is the longest prompt and M the most tokens that admitted
    requests may come to hold, if w_prompt <= w_output: since a tenant's last admission, when its counter was
    the lower one, it has gained at most by what was admitted. Without preemption M is the size of the KV.
    """

    PRUNE_ABOVE = 64  # counters; then once more whenever they have doubled

    def __init__(self, weights: FairnessWeights) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._turns: dict[str, int] = {}
        self._last_turn = 0
        self._order: RisingHeap[float] = RisingHeap(self.of)  # of those that wait
        self._floor = 0.0
        self._last_left: str | None = None
        self._prune_above = self.PRUNE_ABOVE

    def __len__(self) -> int:
        """Counters kept."""
        return len(self._counters)

    def of(self, tenant: str) -> float:
        """The tenant's counter now."""
        counter = self._counters.get(tenant, self._floor)
        return counter if tenant in self._num_waiting else max(counter, self._floor)

    def turn_of(self, tenant: str) -> int:
        """When the tenant last began to wait: the lower, the earlier; 0 for one long gone."""
        return self._turns.get(tenant, 0)

    def join(self, tenant: str) -> None:
        """One more request of this tenant waits. O(log n) of the tenants that wait, amortised."""
        if tenant not in self._num_waiting:
            self._raise_floor()
            self._counters[tenant] = self.of(tenant)
            self._num_waiting[tenant] = 0
            self._last_turn += 1
            self._turns[tenant] = self._last_turn
            self._order.put(tenant)
            self._prune()
        self._num_waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One request of this tenant waits no longer. O(1), amortised."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._order.drop(tenant)
            self._last_left = tenant

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count service for this tenant."""
        cost = self._weights.prompt * num_prompt_tokens + self._weights.output * num_output_tokens
        counter = self._counters.get(tenant, self._floor)
        self._counters[tenant] = counter + cost / self._weights.tenants.get(tenant, 1.0)

    def _raise_floor(self) -> None:
        first = self._order.least()
        if first is not None:
            least = self._counters[first]
        elif self._last_left is not None:
            least = self.of(self._last_left)
        else:
            return
        self._floor = max(self._floor, least)

    def _prune(self) -> None:
        """Drop the counters of tenants that the floor has overtaken."""
        if len(self._counters) <= self._prune_above:
            return
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if tenant in self._num_waiting or counter > self._floor
        }
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if tenant in self._counters}
        self._prune_above = max(self.PRUNE_ABOVE, 2 * len(self._counters))
