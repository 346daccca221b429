"""Items and tools of the Responses API, as a chat has them and back."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from server.api.responses.conversation import decoded, encoded, messages_of, thoughts_of
from server.api.responses.protocol_items import InputItem, ReasoningItem, hosted_kinds
from server.api.responses.tools import custom_input

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def roles(*items: object) -> list[str]:
    return [message.role for message in messages_of(_ITEMS.validate_python(list(items)))]


USER, SAYS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLS = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
GAVE = {"type": "function_call_output", "call_id": "c", "output": "d"}


def test_what_the_assistant_says_and_calls_in_a_row_is_one_message() -> None:
    assert roles(USER, SAYS, CALLS, CALLS, GAVE, GAVE, SAYS, USER) == [
        *("user", "assistant", "tool", "tool", "assistant", "user")
    ]
    (_, message, _) = messages_of(_ITEMS.validate_python([USER, CALLS, SAYS, GAVE]))
    assert message.content == "b" and message.tool_calls and len(message.tool_calls) == 1


def test_only_system_messages_before_all_others_join_the_first() -> None:
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
    assert roles(system, developer, USER, developer) == ["system", "user", "developer"]
    assert messages_of(_ITEMS.validate_python([system, developer]), "i")[0].content == "i\n\ns\n\nd"


@pytest.mark.parametrize("text", ["", "so then", "é🦀\n"])
def test_thoughts_come_back_from_a_client_that_stores_nothing(text: str) -> None:
    assert decoded(encoded(text)) == text
    assert thoughts_of(ReasoningItem(type="reasoning", encrypted_content=encoded(text))) == text


@pytest.mark.parametrize("text", ["gAAAAAB", "slipstream:!", "slipstream:/w==", ""])
def test_what_another_server_encrypted_says_nothing(text: str) -> None:
    assert decoded(text) == ""
    summary = [{"type": "summary_text", "text": "short"}]
    item = ReasoningItem.model_validate({"type": "reasoning", "summary": summary, "encrypted_content": text})
    assert thoughts_of(item) == "short"


def test_items_that_no_model_reads_are_told_once() -> None:
    items = _ITEMS.validate_python([{"type": "mcp_call"}, {"type": "mcp_call", "x": 1}, USER])
    assert hosted_kinds(items) == ["input.mcp_call"]
    assert roles({"type": "mcp_call"}, USER) == ["user"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\u00e9"}', "a\né"),
        ('{"input": "cut sh', "cut sh"),
        ('{"input": "*** Begin Patch\n\t+x\n"}', "*** Begin Patch\n\t+x\n"),
        ('{"input": "a\nb', "a\nb"),
        ('{"input": "a",}', "a"),
        ('{"input": "\\ud83e\\udd80\\ud800"}', "🦀?"),
        ("", ""),
        ("[1]", ""),
        ('{"input": 1}', ""),
        ("no", ""),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
