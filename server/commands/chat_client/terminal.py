"""What goes to the terminal: the model's words made harmless, our own told apart from them."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console
from rich.text import Text

from server.commands.chat_client.word_wrap import WordWrap

# Control characters steer a terminal, and these turn the direction of what follows.
_DIRECTIONS: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def harmless(text: str) -> str:
    """`text` with every character spelled out that would do something to a terminal but write."""
    if text.isprintable():
        return text
    return "".join(_spell(char) for char in text)


def _spell(char: str) -> str:
    is_control = (char < " " and char not in "\n\t") or "\x7f" <= char < "\xa0"
    return f"\\x{ord(char):02x}" if is_control or char in _DIRECTIONS else char


class Terminal:
    """Standard output, and lines of our own beside it.

    `is_plain` leaves the answer alone on standard output: no speed, no colour. Whether the answer is made
    harmless, and broken between words, is another matter: what decides is where it goes, not where the
    question came from. `command` is whose complaints it shows.
    """

    def __init__(self, *, is_plain: bool, command: str = "chat") -> None:
        self.is_plain = is_plain
        self._command = command
        self._is_terminal = sys.stdout.isatty()
        self._console = Console(highlight=False)
        self._wrap = WordWrap(lambda: self._console.width)
        self._at_line_start = True
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character shows a question mark.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        """Part of an answer, at once. A pipe gets what the model wrote, a terminal what is harmless."""
        if text:
            sys.stdout.write(self._wrap.feed(harmless(text)) if self._is_terminal else text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def write_aside(self, text: str) -> None:
        """Part of what is not the answer: reasoning."""
        if not self.is_plain and text:
            self._console.print(Text(self._wrap.feed(harmless(text)), style="dim"), end="", soft_wrap=True)
            self._at_line_start = text.endswith("\n")

    def end_answer(self) -> None:
        """End the answer's last line, if it has not."""
        if not self._at_line_start:
            self.write("\n")

    def note(self, text: str, style: str = "dim") -> None:
        """A line of ours, unless plain; broken between words where it is longer than the terminal is wide."""
        if not self.is_plain:
            self._console.print(Text(harmless(text), style=style))

    def complain(self, text: str) -> None:
        """One line that says what went wrong."""
        if self.is_plain:
            print(f"slipstream: {self._command}: {text}", file=sys.stderr)
        else:
            self.note(text, style="red")
