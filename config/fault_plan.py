"""The fault plan: faults that a test asks the server to commit. No setting, so from the environment only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from config.environment import FAULT_PLAN, FAULT_SWITCH
from config.errors import SettingsError, closest, did_you_mean, plain, shown

FaultPoint: TypeAlias = Literal[
    "forward_raise",
    "forward_oom",
    "forward_sleep",
    "logits_nan",
    "sampler_raise",
    "detokenize_raise",
    "tokenize_raise",
    "draft_raise",
    "draft_sleep",
    "draft_garbage",
    "draft_out_of_vocab",
    "draft_too_many",
    "block_leak",
]
FAULT_POINTS: tuple[FaultPoint, ...] = get_args(FaultPoint)
ALWAYS = -1  # as a count


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """At hit number `at` of `point`, and at each `every`-th hit after it, until it has come `count` times.

    Hits are counted from 1, over the whole process or, with `request`, over that request alone: the number of
    its arrival, from 1. `count` ALWAYS never ends. `seconds` is for the points that sleep.
    """

    point: FaultPoint
    at: int = 1
    count: int = 1
    every: int = 1
    request: int | None = None
    seconds: float = 1.0

    def comes_at(self, hit: int) -> bool:
        """True if it comes at this hit of its point, or of its request there."""
        turn, rest = divmod(hit - self.at, self.every)
        return turn >= 0 and rest == 0 and (self.count == ALWAYS or turn < self.count)


class GivenFaults(NamedTuple):
    """What the environment asks for; `is_ignored` says that there is a plan, unread, without the opt-in."""

    faults: tuple[PlannedFault, ...]
    is_ignored: bool


def read_fault_plan(environ: Mapping[str, str]) -> GivenFaults:
    """The plan, empty unless it is allowed. Raises SettingsError for one that is allowed and wrong."""
    text = environ.get(FAULT_PLAN, "")
    if not text.strip():
        return GivenFaults((), False)
    if environ.get(FAULT_SWITCH) != "1":
        return GivenFaults((), True)
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(f"{shown(text)} is not JSON; expected a list of objects") from None
    if not isinstance(plan, list):
        raise _wrong(f"{shown(text)} is not allowed; expected a list of objects")
    return GivenFaults(tuple(_read_fault(entry, number) for number, entry in enumerate(plan, 1)), False)


def _read_fault(entry: object, number: int) -> PlannedFault:
    where = f"entry {number}: "
    if not isinstance(entry, dict):
        raise _wrong(f"{where}{shown(entry)} is not allowed; expected an object")
    for key in entry:
        if key not in PlannedFault.__slots__:
            raise _wrong(f"{where}unknown key {plain(key)}{did_you_mean(closest(key, _ALLOWED))}")
    for key, (is_right, allowed) in _ALLOWED.items():
        if key in entry and not is_right(entry[key]):
            raise _wrong(f"{where}{key} = {shown(entry[key])} is not allowed; expected {allowed}")
    if "point" not in entry:
        raise _wrong(f"{where}point is missing; expected {_ALLOWED['point'][1]}")
    if "every" in entry:  # who says how often says that it is not once
        entry.setdefault("count", ALWAYS)
    return PlannedFault(**entry)


def _is_point(value: Any) -> bool:
    return value in FAULT_POINTS


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_count(value: Any) -> bool:
    return _is_number(value) or (type(value) is int and value == ALWAYS)


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= 0


_WHOLE = "a whole number, 1 or more"
_ALLOWED = {
    "point": (_is_point, f"one of {', '.join(FAULT_POINTS)}"),
    "at": (_is_number, _WHOLE),
    "count": (_is_count, f"{_WHOLE}, or -1 for always"),
    "every": (_is_number, _WHOLE),
    "request": (_is_number, _WHOLE),
    "seconds": (_is_duration, "a number of seconds, 0 or more"),
}


def _wrong(what: str) -> SettingsError:
    return SettingsError(f"env {FAULT_PLAN}: {what}")
