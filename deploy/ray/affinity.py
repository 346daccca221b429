"""Which replica should answer: the one that holds the prompt's prefix, unless it has too much to do.

Pure: no Ray, no clock. A prompt is known by the hashes of its first 128, 256, 512, ... characters.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from pydantic_core import from_json

R = TypeVar("R", bound=Hashable)

FIRST_CUT = 128  # characters; a shorter common prefix saves too little to bend the load for
MAX_HOLDERS = 8
KV_FULL = 0.95  # from here on an engine soon preempts, and its cached prefixes go first


def prompt_keys(body: bytes, session: str | None = None) -> tuple[bytes, ...]:
    """The keys of a request, the strongest first: its session, then ever shorter prefixes of its prompt.

    `session` is a caller's own label; the body's `prompt_cache_key` counts as one. Empty for a body without
    a prompt.
    """
    try:
        fields = from_json(body)
        if not isinstance(fields, dict):
            return ()
        session = session or fields.get("prompt_cache_key")
        named = (_digest("session", str(session)),) if session else ()
        return named + _prefix_keys(fields)
    except ValueError:  # not JSON, or numbers too long to be written: the replica says what is wrong
        return ()


def _prefix_keys(fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    prompt = fields.get("messages") or fields.get("prompt")
    if not prompt:
        return ()
    # In the order in which a template writes them, so that a longer conversation continues a shorter one.
    text = json.dumps([fields.get("cache_salt"), fields.get("tools"), prompt], separators=(",", ":"))
    keys: list[bytes] = []
    cut = FIRST_CUT
    while cut <= len(text):
        keys.append(_digest("prefix", text[:cut]))
        cut *= 2
    return tuple(reversed(keys))


def _digest(*parts: str) -> bytes:
    return blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Requests at a replica, running or waiting, and the share of its K/V that requests hold (0 to 1)."""

    requests: float
    kv_usage: float = 0.0


@dataclass(slots=True)
class Affinity(Generic[R]):
    """Remembers which replica answered which prefix, the latest `capacity` keys.

    A holder is preferred while it has at most `spill` requests more than the emptiest replica.
    """

    spill: int
    capacity: int = 100_000
    _holders: OrderedDict[bytes, tuple[R, ...]] = field(default_factory=OrderedDict)

    def choose(self, keys: Sequence[bytes], loads: Mapping[R, ReplicaLoad], seed: str = "") -> R:
        """The replica for a request with `keys`. Changes nothing. `loads` has at least one.

        Without a holder that has room it is the emptiest; among equals the strongest key decides, or `seed`
        where there is none, so that several routers agree without speaking to each other.
        """
        least = min(load.requests for load in loads.values())
        for key in keys:
            holders = [replica for replica in self._holders.get(key, ()) if replica in loads]
            free = [replica for replica in holders if self._has_room(loads[replica], least)]
            if free:
                return min(free, key=lambda replica: loads[replica].requests)
        emptiest = [replica for replica, load in loads.items() if load.requests == least]
        salt = keys[0].hex() if keys else seed
        return min(emptiest, key=lambda replica: _digest(salt, str(replica)))

    def _has_room(self, load: ReplicaLoad, least: float) -> bool:
        return load.requests - least <= self.spill and load.kv_usage < KV_FULL

    def record(self, keys: Iterable[bytes], replica: R) -> None:
        """`replica` answers a request with `keys`, and holds their prefixes from now on."""
        for key in keys:
            others = [each for each in self._holders.pop(key, ()) if each != replica]
            self._holders[key] = (replica, *others)[:MAX_HOLDERS]
        while len(self._holders) > self.capacity:
            self._holders.popitem(last=False)
