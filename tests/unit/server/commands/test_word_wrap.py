"""Text in pieces of any size is broken between words, and nothing of it is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from server.commands.chat_client.word_wrap import WordWrap


def shown(pieces: list[str], width: int) -> str:
    """What stands on the screen in the end."""
    wrap = WordWrap(lambda: width)
    screen = ""
    for piece in pieces:
        for part in re.split(r"(\x1b\[\d+D\x1b\[K)", wrap.feed(piece)):
            back = re.fullmatch(r"\x1b\[(\d+)D\x1b\[K", part)
            if back is None:
                screen += part
                continue
            cells, kept = int(back[1]), len(screen)
            while cells > 0:
                kept -= 1
                cells -= cell_len(screen[kept])
            screen = screen[:kept]
    return screen


@pytest.mark.parametrize(
    ("text", "screen"),
    [
        ("The quick brown fox jumps", "The quick\nbrown fox\njumps"),
        ("a\nb c", "a\nb c"),
        ("aaaaaaaaaaaaaaaaaaaa b", "aaaaaaaaa\naaaaaaaaa\naa b"),
        ("x aaaaaaaaaaaaaaaa b", "x \naaaaaaaaa\naaaaaaa b"),
        ("\u65e5\u672c\u8a9e\u306e\u6587\u7ae0", "\u65e5\u672c\u8a9e\u306e\n\u6587\u7ae0"),
    ],
)
def test_lines_end_between_words(text: str, screen: str) -> None:
    for size in (1, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert [line.rstrip() for line in shown(pieces, 10).split("\n")] == [
            line.rstrip() for line in screen.split("\n")
        ]


@given(st.lists(st.text("ab \n\t\u65e5e\u0301", max_size=9)), st.integers(4, 40))
def test_nothing_is_lost_and_no_line_is_too_long(pieces: list[str], width: int) -> None:
    screen = shown(pieces, width)
    assert "".join(screen.split()) == "".join("".join(pieces).split())
    for line in screen.expandtabs(8).split("\n"):
        assert cell_len(line) < width or "\t" in screen
