"""StoredResponses: what was answered, in memory, for the key that asked: read again, continued or deleted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.api.responses.protocol_items import InputItem

MAX_STORED_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation up to its end, the input of earlier ones included.

    `num_bytes` is about the memory of both, as if no other response shared any of it.
    """

    response_id: str
    tenant: str | None
    reply: Mapping[str, object]
    items: Sequence[InputItem]
    num_bytes: int


@dataclass(slots=True)
class _Kept:
    """What one tenant has, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class StoredResponses:
    """Keeps the newest that fit both limits; a response that is continued is as new as its successor.

    The tenant that has most makes room with its oldest. What belongs to another tenant is not found.
    Loop thread only.
    """

    def __init__(self, most: int = 1000, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[str | None, _Kept] = {}  # by tenant, of those that have any
        self._items: dict[str, tuple[str, InputItem]] = {}  # of output: the response's id and the item
        self._item_ids: dict[str, list[str]] = {}  # by the response's id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._item_ids)

    @property
    def is_open(self) -> bool:
        """False where nothing may be stored."""
        return self._most > 0

    def add(self, response: StoredResponse, output: Sequence[InputItem]) -> None:
        """Keep `response`, whose `output` may be referred to by id; old ones make room."""
        kept = self._kept.setdefault(response.tenant, _Kept())
        kept.responses[response.response_id] = response
        kept.num_bytes += response.num_bytes
        self.num_bytes += response.num_bytes
        named = {item.id: (response.response_id, item) for item in output if item.id is not None}
        self._items |= named
        self._item_ids[response.response_id] = list(named)
        while len(self) > self._most:
            self._drop_oldest_of(max(self._kept.values(), key=lambda each: len(each.responses)))
        while self.num_bytes > self._most_bytes:
            self._drop_oldest_of(max(self._kept.values(), key=lambda each: each.num_bytes))

    def find(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """The tenant's response of this id, None if there is none or no longer."""
        kept = self._kept.get(tenant)
        return None if kept is None else kept.responses.get(response_id)

    def resume(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """As `find`, for a response that is continued."""
        found = self.find(response_id, tenant)
        if found is not None:
            self._kept[tenant].responses.move_to_end(response_id)
        return found

    def item(self, item_id: str, tenant: str | None) -> InputItem | None:
        """An item of a stored response's output."""
        found = self._items.get(item_id)
        if found is None or self.find(found[0], tenant) is None:
            return None
        return found[1]

    def delete(self, response_id: str, tenant: str | None) -> bool:
        """Forget the tenant's response; False if there is none."""
        found = self.find(response_id, tenant)
        if found is not None:
            self._drop(found)
        return found is not None

    def _drop_oldest_of(self, kept: _Kept) -> None:
        self._drop(next(iter(kept.responses.values())))

    def _drop(self, response: StoredResponse) -> None:
        kept = self._kept[response.tenant]
        del kept.responses[response.response_id]
        kept.num_bytes -= response.num_bytes
        self.num_bytes -= response.num_bytes
        if not kept.responses:
            del self._kept[response.tenant]
        for item_id in self._item_ids.pop(response.response_id):
            del self._items[item_id]
