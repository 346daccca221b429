"""How many engines the queues ask for."""

from __future__ import annotations

from typing import Any

QUEUE_DEPTH = "queue_depth"


class QueueDepthPolicy:
    """Ray Serve's autoscaling policy: enough engines for `target` requests each, running or waiting.

    Ray applies the limits and the delays to its answer.
    """

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The wanted number; the present one while no engine has reported."""
        depths = (context.aggregated_metrics or {}).get(QUEUE_DEPTH)
        if not depths:
            return context.target_num_replicas, {}
        # A replica that is still starting has reported nothing, and would have its share.
        return sum(depths.values()) / self._target, {}
