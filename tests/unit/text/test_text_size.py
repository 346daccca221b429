"""What a template is given is counted wherever the text lies, and no further than is of interest."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.text_size import count_chars

CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": ["TEXT", 1, None]}}}


@pytest.mark.parametrize(
    "value",
    [
        "TEXT",
        [{"role": "user", "content": "TEXT"}],
        [{"role": "user", "content": [{"type": "text", "text": "TEXT"}]}],
        [{"role": "tool", "content": "", "tool_call_id": "TEXT"}],
        [{"role": "user", "content": "", "name": "TEXT"}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "TEXT"}}]}],
        [{"type": "function", "function": {"name": "f", "parameters": {"TEXT": {}}}}],
        {"documents": ("TEXT",), "chat_template_kwargs": {"x": {"y": {"z": "TEXT"}}}},
    ],
)
def test_text_counts_wherever_it_is(value: Any) -> None:
    def with_text(text: str, part: Any) -> Any:
        if isinstance(part, str):
            return part.replace("TEXT", text)
        if isinstance(part, dict):
            return {with_text(text, key): with_text(text, each) for key, each in part.items()}
        return [with_text(text, each) for each in part] if isinstance(part, list | tuple) else part

    places = str(value).count("TEXT")
    few, many = (count_chars(with_text("x" * size, value), 10**9) for size in (10, 1010))
    assert many - few == 1000 * places
    assert few < len(str(value)) + 10 * places + 20


def test_what_is_no_text_counts_too() -> None:
    assert count_chars([1] * 500, 10**9) >= 1000
    assert count_chars({"a": True, "b": None}, 10**9) >= 4


def test_counting_ends_at_the_limit() -> None:
    class Unread(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("nobody needs to look")

    assert count_chars([Unread("ab"), "x" * 100], 50) > 50
    assert count_chars(Unread("x" * 100), 50) > 50


def test_depth_is_no_matter() -> None:
    deep: Any = "x" * 7
    for _ in range(100_000):
        deep = [deep]
    assert count_chars(deep, 10**9) == 200_000 + 7
