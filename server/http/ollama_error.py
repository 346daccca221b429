"""ollama_error: any error in the shape that Ollama's clients read."""

from __future__ import annotations

_PREFIX = "/api/"


def speaks_ollama(path: str) -> bool:
    """Whether what is at `path` answers in Ollama's shapes, or would with --ollama-api."""
    return path.startswith(_PREFIX)


def ollama_error(message: str) -> dict[str, object]:
    """The JSON object, of a reply and of a line."""
    return {"error": message}
