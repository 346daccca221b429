"""one_call_each: a conversation without parallel calls, for templates that take one call a message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile


def one_call_each(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The same with parallel calls one after the other, each in a message, with its result behind it."""
    return list(_apart(messages))


def _apart(messages: Sequence[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            yield dict(message)
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", messages[at : at + len(calls)]))
        at += len(results)
        waiting: dict[object, deque[Mapping[str, object]]] = {}
        for result in results:
            waiting.setdefault(result.get("tool_call_id"), deque()).append(result)
        yield {**message, "tool_calls": calls[:1]}
        for number, call in enumerate(calls):
            if number:
                yield {"role": message["role"], "content": "", "tool_calls": [call]}
            if found := waiting.get(call.get("id")):
                yield dict(found.popleft())
        yield from (dict(result) for left in waiting.values() for result in left)
