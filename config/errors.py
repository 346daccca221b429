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


def hint(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' when one of `known` is close to `word`, else nothing."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
