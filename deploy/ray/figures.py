"""Several replicas' figures for the status page, or their live requests, as one reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MEAN = "speedup"  # a ratio; everything else that is counted can be added


def add_figures(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the first, and one sample that adds up the last of each.

    It has no past: replicas start and are replaced at times of their own. `replies` are not empty.
    """
    lasts = [reply["samples"][-1] for reply in replies]
    total = {name: _add([last[name] for last in lasts]) for name in lasts[0]}
    total["at"] = min(last["at"] for last in lasts)
    total[_MEAN] = total[_MEAN] / len(lasts)
    return {**replies[0], "started": max(reply["started"] for reply in replies), "samples": [total]}


def join_requests(replies: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """The `limit` oldest live requests of all replicas, of which each has listed its own as far."""
    data = sorted((each for reply in replies for each in reply["data"]), key=lambda each: -each["age_ms"])
    has_more = len(data) > limit or any(reply["has_more"] for reply in replies)
    return {"object": "list", "data": data[:limit], "has_more": has_more}


def _add(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        return [sum(each) for each in zip(*values, strict=True)]
    if isinstance(first, dict):
        return {name: sum(value[name] for value in values) for name in first}
    return sum(values)
