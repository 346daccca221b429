"""Unknown fields are looked for where there can be any."""

from __future__ import annotations

from collections.abc import Iterator

from server.api.openai.protocol import ChatCompletionRequest
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


def test_of_many_only_the_first_are_compared_with_what_there_is() -> None:
    many = {f"mx_tokens{i}": 1 for i in range(1000)}
    data = {"messages": [{"role": "user", "content": "a", "reasonin": 1}] * 200, "temprature": 1, **many}
    found = list(unknown_fields(ChatCompletionRequest.model_validate(data), data))
    assert found[:200] == [UnknownField("messages[].reasonin", "messages[].reasoning")] * 200
    assert found[200] == UnknownField("temprature", "temperature")
    meant = [each.meant for each in found[201:]]
    assert len(meant) == 1000 and meant.count("max_tokens") == 98 == len(list(filter(None, meant)))


def test_before_each_part_of_a_body_others_may_run() -> None:
    """While it is checked as well as while unknown fields are looked for."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    data = {"messages": [{"role": "assistant", "tool_calls": [call] * 10}] * 20}
    num_parts = 1 + 20 * (1 + 10 * 2)
    rests: list[str] = []
    body = ChatCompletionRequest.model_validate(data, context=lambda: rests.append("checked"))
    assert rests.count("checked") >= num_parts
    assert not list(unknown_fields(body, data, rest=lambda: rests.append("looked at")))
    assert rests.count("looked at") >= num_parts
