"""The one error of this layer."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MAX_SHOWN = 100


class SettingsError(Exception):
    """The settings cannot be used; the message is one line that says where, what, and what is allowed."""


def shown(value: object) -> str:
    """`value` for an error line: quoted, control characters escaped, at most 100 characters of it."""
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…")


def plain(text: str) -> str:
    """A name for an error line, as `shown` but without the quotes."""
    return shown(text)[1:-1]


def closest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The one of `known` that `word` was probably meant to be; None when nothing is as like as that."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def did_you_mean(name: str | None) -> str:
    """The end of an error line that offers `name`; nothing for None."""
    return f"; did you mean {name}?" if name else ""
