"""AffinityRouter: the affinity rule as a request router of Ray Serve, one in the handle of each front."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray.affinity import Affinity, ReplicaLoad

KV_USAGE = "kv_usage"


class AffinityRouter(RequestRouter):
    """Sends a request to the replica that holds its prefix, or to the emptiest.

    A call names its keys in the keyword argument `keys`; replicas report `KV_USAGE`. The requests at a
    replica are those this router has sent there: Ray's own count drifts when short calls overtake each other,
    and what replicas report is seconds old. Of several routers each evens out its own part of the load.
    """

    def initialize_state(self, spill: int = 1) -> None:
        """Called once by Ray with the configuration's `request_router_kwargs`."""
        self._affinity: Affinity[str] = Affinity(spill)
        self._num_open: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen one, then all others, for when that one is at Ray's own limit."""
        if not candidate_replicas:
            return []
        keys: tuple[bytes, ...] = ()
        seed = ""
        if pending_request is not None:
            keys = pending_request.kwargs.get("keys", ())
            seed = pending_request.metadata.internal_request_id
            # Without this Ray would ask again at once, for ever, while all are at its limit.
            pending_request.routing_context.should_backoff = True
        loads = {_name(replica.replica_id): self._load_of(replica) for replica in candidate_replicas}
        chosen = self._affinity.choose(keys, loads, seed)
        first = [replica for replica in candidate_replicas if _name(replica.replica_id) == chosen]
        return [first, [replica for replica in candidate_replicas if replica not in first]]

    def _load_of(self, replica: RunningReplica) -> ReplicaLoad:
        return ReplicaLoad(
            self._num_open[_name(replica.replica_id)], replica.routing_stats.get(KV_USAGE, 0.0)
        )

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Ray when a request goes out to a replica."""
        super().on_send_request(replica_id)
        self._num_open[_name(replica_id)] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray when a replica has taken the request."""
        self._affinity.record(pending_request.kwargs.get("keys", ()), _name(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a request has ended, whatever way; rarely for one that never went out."""
        self._num_open -= Counter([_name(replica_id)])  # never below none, and then forgotten


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
