"""What drafting gains by the server's own account, from its /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from server.commands.remote.address import Address
from server.commands.remote.failures import RemoteError
from server.commands.remote.http_client import HttpClient

_TIMEOUT_S = 5.0  # a server that is asked for figures only is not waited for longer
_MEASURED = "slipstream_speculation_speedup_ratio"
_BY_FORMULA = "slipstream_speculation_theoretical_speedup_ratio"


@dataclass(frozen=True, slots=True)
class DraftSpeedup:
    """Tokens in a step's time over those without drafts, of the last steps; the mean of several replicas."""

    measured: float
    by_formula: float


async def read_draft_speedup(client: HttpClient, address: Address) -> DraftSpeedup | None:
    """What the server says now; None where it says nothing, or nothing in time."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await client.fetch("GET", f"{address.root}/metrics")
    except (RemoteError, TimeoutError):
        return None
    text = reply.body.decode("utf-8", "replace")
    measured, by_formula = list(_values(text, _MEASURED)), list(_values(text, _BY_FORMULA))
    if reply.status != 200 or not (measured and by_formula):
        return None
    return DraftSpeedup(fmean(measured), fmean(by_formula))


def _values(text: str, name: str) -> Iterator[float]:
    """The samples of a gauge in Prometheus text."""
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            try:
                yield float(line.rpartition(" ")[2])
            except ValueError:
                continue
