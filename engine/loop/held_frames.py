"""release_frames: free what the frames of an error still hold."""

from __future__ import annotations

import traceback


def release_frames(error: BaseException) -> None:
    """Clear the local variables of every finished frame in the traceback of `error` and of its causes.

    A future keeps its error, and the error its frames, until cycles are collected, which is rare. Without
    this, the tensors of a failed pass stay in memory until then.
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
