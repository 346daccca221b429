"""StoredResponses: both limits, what makes room, and who finds what."""

from __future__ import annotations

from server.api.responses.protocol_items import MessageItem
from server.api.responses.store import StoredResponse, StoredResponses


def response(name: str, num_bytes: int = 10, tenant: str | None = None) -> StoredResponse:
    return StoredResponse(name, tenant, {"id": name}, [], num_bytes)


def item(name: str) -> MessageItem:
    return MessageItem(id=name, role="assistant", content="a")


def test_the_oldest_make_room_for_what_comes() -> None:
    store = StoredResponses(most=3)
    for name in "abcd":
        store.add(response(name), [item(f"msg_{name}")])
    assert [name for name in "abcd" if store.find(name, None)] == ["b", "c", "d"]
    assert store.item("msg_a", None) is None and store.item("msg_b", None) is not None
    assert (len(store), store.num_bytes) == (3, 30)


def test_what_is_continued_is_young_again_and_what_is_read_is_not() -> None:
    store = StoredResponses(most=2)
    store.add(response("a"), [])
    store.add(response("b"), [])
    assert store.resume("a", None) and store.find("b", None)
    store.add(response("c"), [])
    assert store.find("a", None) and not store.find("b", None)


def test_bytes_are_bounded_too() -> None:
    store = StoredResponses(most=100, most_bytes=100)
    for name in "abc":
        store.add(response(name, 40), [])
    assert (len(store), store.num_bytes) == (2, 80)
    store.add(response("large", 101), [])
    assert (len(store), store.num_bytes) == (0, 0)


def test_nothing_of_another_tenant_is_found() -> None:
    store = StoredResponses()
    store.add(response("a", tenant="one"), [item("msg_a")])
    assert store.find("a", "two") is None and store.resume("a", None) is None
    assert store.item("msg_a", "two") is None
    assert not store.delete("a", "two")
    assert store.delete("a", "one") and not store.delete("a", "one")
    assert (len(store), store.num_bytes, store.item("msg_a", "one")) == (0, 0, None)


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = StoredResponses(most=0)
    assert not store.is_open
    store.add(response("a"), [item("msg_a")])
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_tenant_that_stores_much_makes_room_itself() -> None:
    store = StoredResponses(most=4, most_bytes=100)
    store.add(response("quiet", 30, "one"), [])
    for name in "abcdef":
        store.add(response(name, tenant="two"), [item(f"msg_{name}")])
    assert store.find("quiet", "one")
    assert [name for name in "abcdef" if store.find(name, "two")] == ["d", "e", "f"]
    assert store.item("msg_c", "two") is None
    store.add(response("large", 50, "two"), [])
    assert [name for name in ("d", "e", "f", "large") if store.find(name, "two")] == ["e", "f", "large"]
    store.add(response("larger", 60, "two"), [])
    assert store.find("quiet", "one") and store.find("larger", "two")
    assert (len(store), store.num_bytes) == (2, 90)
