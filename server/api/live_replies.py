"""LiveReplies: the replies being generated, under the names by which their callers may act on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiveReply:
    """One reply and the engine's requests behind it, one a choice.

    `label` is the caller's own id, None without one. `arrival_time` is in seconds of the engine's clock.
    """

    reply_id: str
    label: str | None
    tenant: str | None
    request_ids: Sequence[str]
    arrival_time: float


class LiveReplies:
    """Finds a reply by its id or its label, for the tenant that made it and no other. Loop thread only."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveReply] = {}
        self._by_label: dict[tuple[str | None, str], list[LiveReply]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, reply: LiveReply) -> None:
        """A reply's requests were submitted."""
        self._by_id[reply.reply_id] = reply
        if reply.label is not None:
            self._by_label.setdefault((reply.tenant, reply.label), []).append(reply)

    def close(self, reply: LiveReply) -> None:
        """It has ended, or its reader has gone. Safe to call twice."""
        if self._by_id.pop(reply.reply_id, None) is None or reply.label is None:
            return
        key = (reply.tenant, reply.label)
        same = self._by_label[key]
        same.remove(reply)
        if not same:
            del self._by_label[key]

    def of(self, tenant: str | None) -> Iterator[LiveReply]:
        """The tenant's replies, oldest first."""
        return (reply for reply in self._by_id.values() if reply.tenant == tenant)

    def find(self, name: str, tenant: str | None) -> LiveReply | None:
        """The tenant's reply of this id or label, the newest of that label; None if there is none."""
        reply = self._by_id.get(name)
        if reply is not None and reply.tenant == tenant:
            return reply
        labelled = self._by_label.get((tenant, name))
        return labelled[-1] if labelled else None
