"""Unknown fields are looked for where there can be any."""

from __future__ import annotations

from collections.abc import Iterator

from server.api.openai.protocol_tokens import DetokenizeRequest, TokenizeRequest
from server.api.unknown_fields import UnknownField, unknown_fields


class Unread(list[int]):
    """A list that is too long to be walked through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it was walked through")


def test_no_list_of_numbers_is_walked_through() -> None:
    body = DetokenizeRequest(tokens=[1, 2])
    data = {"tokens": Unread([1, 2]), "colour": 1}
    assert [each.path for each in unknown_fields(body, data)] == ["colour"]


def test_objects_in_a_list_are() -> None:
    data = {"messages": [{"role": "user", "content": "a", "colour": 1}]}
    body = TokenizeRequest.model_validate(data)
    assert list(unknown_fields(body, data)) == [UnknownField("messages[].colour", None)]
