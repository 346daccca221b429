"""What the user says next, typed or pasted. A paste of several lines is one question."""

from __future__ import annotations

import contextlib
import select
import sys


class LineEditor:
    """Reads lines with readline where Python has it; its history lasts as long as the process.

    GNU readline keeps a paste together by itself, once it is told to. Where it is missing, lines that have
    come already when one is read belong to it: nobody types as fast.
    """

    def __init__(self) -> None:
        self._keeps_pastes = False
        with contextlib.suppress(ImportError):
            import readline

            if "libedit" not in (readline.__doc__ or ""):
                readline.parse_and_bind("set enable-bracketed-paste on")
                self._keeps_pastes = True

    def read(self) -> str:
        """A line, or all lines of a paste; one that ends in \\ goes on in the next.

        Raises EOFError at the end, KeyboardInterrupt and UnicodeDecodeError.
        """
        lines: list[str] = []
        while True:
            lines.append(input("  " if lines else "> "))
            if lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
            elif self._keeps_pastes or not _is_there_more():
                return "\n".join(lines).strip()


def _is_there_more() -> bool:
    """True where another line can be read without waiting."""
    try:
        return bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # no such thing for a console of Windows
        return False
