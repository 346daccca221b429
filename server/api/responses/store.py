"""StoredResponses: what was answered, in memory, for the key that asked: read again, continued or deleted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


class StoredResponses:
    """Keeps the newest that fit both limits; a response that is continued is as new as its successor.

    What belongs to another tenant is not found. Loop thread only.
    """

    def __init__(self, most: int = 1000, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, tuple[str, InputItem]] = {}  # of output: the response's id and the item
        self._item_ids: dict[str, list[str]] = {}  # by the response's id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def is_open(self) -> bool:
        """False where nothing may be stored."""
        return self._most > 0

    def add(self, response: StoredResponse, output: Sequence[InputItem]) -> None:
        """Keep `response`, whose `output` may be referred to by id; the oldest make room."""
        self._by_id[response.response_id] = response
        self.num_bytes += response.num_bytes
        named = {item.id: (response.response_id, item) for item in output if item.id is not None}
        self._items |= named
        self._item_ids[response.response_id] = list(named)
        while self._by_id and (len(self._by_id) > self._most or self.num_bytes > self._most_bytes):
            self._drop(next(iter(self._by_id)))

    def find(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """The tenant's response of this id, None if there is none or no longer."""
        found = self._by_id.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def resume(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """As `find`, for a response that is continued."""
        found = self.find(response_id, tenant)
        if found is not None:
            self._by_id.move_to_end(response_id)
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
            self._drop(response_id)
        return found is not None

    def _drop(self, response_id: str) -> None:
        dropped = self._by_id.pop(response_id)
        self.num_bytes -= dropped.num_bytes
        for item_id in self._item_ids.pop(response_id):
            del self._items[item_id]
