"""LiveReplies: the replies being generated, under the names by which their callers may act on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LiveReply:
    """One reply and the engine's requests behind it, one a choice.

    `label` is the caller's own id, None without one. `arrival_time` is in seconds of the engine's clock.
    `is_background` says that nobody waits for it: it is a line of a batch.
    """

    reply_id: str
    label: str | None
    tenant: str | None
    request_ids: Sequence[str]
    arrival_time: float
    is_background: bool = False


class LiveReplies:
    """Finds a reply by its id or its label, for the tenant that made it and no other. Loop thread only.

    `on_change` is called when `num_interactive`, the choices that somebody waits for, has changed.
    """

    def __init__(self) -> None:
        self.num_interactive = 0
        self.on_change: Callable[[], None] = lambda: None
        self._by_id: dict[str, LiveReply] = {}
        self._by_label: dict[tuple[str | None, str], list[LiveReply]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, reply: LiveReply) -> None:
        """A reply's requests were submitted."""
        self._by_id[reply.reply_id] = reply
        self._count(reply, 1)
        if reply.label is not None:
            self._by_label.setdefault((reply.tenant, reply.label), []).append(reply)

    def close(self, reply: LiveReply) -> None:
        """It has ended, or its reader has gone. Safe to call twice."""
        if self._by_id.pop(reply.reply_id, None) is None:
            return
        self._count(reply, -1)
        if reply.label is None:
            return
        key = (reply.tenant, reply.label)
        same = self._by_label[key]
        same.remove(reply)
        if not same:
            del self._by_label[key]

    def _count(self, reply: LiveReply, sign: int) -> None:
        if not reply.is_background:
            self.num_interactive += sign * len(reply.request_ids)
            self.on_change()

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
