"""What threads are at, for the log of a hang."""

from __future__ import annotations

import sys
import threading
import traceback


def thread_stacks(*names: str) -> str:
    """The Python stacks of the live threads whose names begin with one of these, each under its name."""
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in threading.enumerate():
        if thread.name.startswith(names) and thread.ident in frames:
            lines += [f"thread {thread.name}\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(lines)
