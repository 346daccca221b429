"""A Dockerfile as tests read it: stages of instructions, without the builder."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """What one FROM begins: the base, the name, and each instruction with the text after it."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """The texts of every instruction of that word, in order."""
        return [text for name, text in self.instructions if name == word]

    def last(self, word: str) -> str:
        """What holds in the end. Raises IndexError when there is no such instruction."""
        return self.all(word)[-1]

    def pairs(self, word: str) -> dict[str, str]:
        """The NAME=VALUE pairs of ENV or LABEL."""
        return dict(pair.split("=", 1) for text in self.all(word) for pair in shlex.split(text))

    def command(self, word: str) -> list[str]:
        """The words of an instruction in exec form, without its flags. Raises ValueError for another."""
        text = self.last(word)
        words = json.loads(text[text.index("[") :])
        assert isinstance(words, list)
        return words


def read_dockerfile(path: Path) -> list[Stage]:
    """The stages in order; what stands before the first FROM is left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, text = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = text.split()
            stages.append(Stage(base, name))
        elif word and stages:
            stages[-1].instructions.append((word, text.strip()))
    return stages
