"""The fenced blocks of a Markdown page, and what each is for by the words behind its fence.

    ```sh               run by bash, where the page has come to
    ```python           run by the environment's Python
    ```toml FILE        written to FILE; so is every block with a second word, whatever its language
    ```text             read only, as are json, toml and yaml without a file

A block without a word is refused: whoever writes one says which it is.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

RUN: Final = frozenset({"sh", "bash", "python"})
READ: Final = frozenset({"text", "json", "toml", "yaml"})

_FENCE: Final = re.compile(r"^```(.*)$")
_SERVER: Final = re.compile(r"^(\w+=\S* +)*(make serve|slipstream serve)\b")


class PageError(Exception):
    """The page cannot be followed; the message says where."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block; `line` is where its fence stands, `file` what it is written to, None for none."""

    line: int
    language: str
    file: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do in a shell. A server stays, and is ready before the next step."""

    script: str
    is_server: bool


def read_blocks(page: str) -> list[Block]:
    """The blocks of `page` in order. Raises PageError."""
    blocks: list[Block] = []
    begun: tuple[int, str] | None = None
    text: list[str] = []
    for number, line in enumerate(page.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            text.append(line)
        elif begun is None:
            begun, text = (number, fence[1].strip()), []
        else:
            blocks.append(_block(*begun, "\n".join(text) + "\n"))
            begun = None
    if begun is not None:
        raise PageError(f"line {begun[0]}: the block has no end")
    return blocks


def _block(line: int, words: str, text: str) -> Block:
    language, _, file = words.partition(" ")
    if not file and language not in RUN | READ:
        known = ", ".join(sorted(RUN | READ))
        raise PageError(f"line {line}: the fence says {language or 'nothing'!r}; expected one of {known}")
    return Block(line, language, file.strip() or None, text)


def steps_of(script: str) -> Iterator[Step]:
    """The steps of a shell script: servers each by itself, what is between two of them together."""
    waiting: list[str] = []
    for command in commands_of(script):
        if _SERVER.match(command):
            if waiting:
                yield Step("\n".join(waiting), is_server=False)
                waiting = []
            yield Step(command, is_server=True)
        else:
            waiting.append(command)
    if waiting:
        yield Step("\n".join(waiting), is_server=False)


def commands_of(script: str) -> Iterator[str]:
    """The commands of a shell script, each with all its lines; without empty lines and comments."""
    command = ""
    for line in script.splitlines():
        if not command and (not line.strip() or line.lstrip().startswith("#")):
            continue
        command += line if not command else f"\n{line}"
        if _is_complete(command):
            yield command
            command = ""
    if command:
        raise PageError(f"the command {command!r} has no end")


def _is_complete(command: str) -> bool:
    if command.endswith("\\"):
        return False
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0
