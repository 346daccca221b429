"""count_chars: how much text a value holds, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping


def count_chars(value: object, limit: int) -> int:
    """The characters of all texts in `value`, keys included, and two for each other value: itself, a comma.

    The texts are those of plain JSON data, however deep. Once there are more than `limit`, counting ends:
    what is returned then is more than `limit` and at most the whole. Any thread.
    """
    total = 0
    pending: list[object] = [value]
    while pending and total <= limit:
        each = pending.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, Mapping):
            total += 2 * len(each)
            if total <= limit:  # or a list of millions would be copied for nothing
                pending += each.keys()
                pending += each.values()
        elif isinstance(each, list | tuple):
            total += 2 * len(each)
            if total <= limit:
                pending += each
        else:
            total += 2
    return total
