"""joined_users: a conversation in which no two messages of the user follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby


def joined_users(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The same with neighbours of the user as one message: many templates insist that roles take turns."""
    found: list[dict[str, object]] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        first, *more = group
        if role == "user" and more:
            texts = (str(each["content"]) for each in (first, *more))
            found.append({**first, "content": "\n\n".join(texts)})
        else:
            found += map(dict, (first, *more))
    return found
