"""let_go: frees what the frames that an error came through still hold."""

from __future__ import annotations

import traceback


def let_go(error: BaseException) -> None:
    """Clear the variables of every frame that `error`, and what led to it, came through and that has ended.

    Such frames live on in the error, and an error that a future holds lives on until cycles are collected,
    which is seldom: with it would live every tensor that a failed pass had in its hands.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        todo += (found.__cause__, found.__context__)
