"""Several replicas' figures for the status page as one reply."""

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


def _add(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        return [sum(each) for each in zip(*values, strict=True)]
    if isinstance(first, dict):
        return {name: sum(value[name] for value in values) for name in first}
    return sum(values)
