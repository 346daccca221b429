"""What has been said, and how the next answer is asked for. Knows neither terminal nor network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, str]


@dataclass(slots=True)
class Sampling:
    """The parameters sent along; None leaves one to the server."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(slots=True)
class Conversation:
    """One conversation. `turns` are user's and assistant's by turns; `system` stands before them all."""

    model: str
    sampling: Sampling
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """All of it, as the API takes it."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def body(self, question: str) -> bytes:
        """The JSON of the request that asks `question` next; nothing is added to the conversation."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*self.messages, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in Sampling.__slots__:
            value = getattr(self.sampling, name)
            if value is not None:
                body[name] = value
        return json.dumps(body).encode()

    def add(self, question: str, answer: str) -> None:
        """Take over an answered question."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forget what was said; system prompt and parameters stay."""
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write it to a new file: JSON for a name in .json, else readable text. Raises OSError."""
        if path.suffix.lower() == ".json":
            text = json.dumps({"model": self.model, "messages": self.messages}, indent=1, ensure_ascii=False)
        else:
            text = "\n\n".join(f"## {each['role']}\n\n{each['content']}" for each in self.messages)
        with path.expanduser().open("x", encoding="utf-8", errors="replace") as file:
            file.write(text + "\n")
