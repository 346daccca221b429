"""Key files: API keys, one a line, each by itself or as NAME = KEY."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_NAME = r"[A-Za-z0-9._-]{1,64}"
_LINE = re.compile(rf"(?:({_NAME})\s+=\s+)?([!-~]+)")
RESERVED = ("anonymous", "other")  # tenant labels of `TenantShares`; a client need not load an engine


class KeyFileError(Exception):
    """The file cannot be used; the message says why and holds nothing of what is in it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, and the name of its holder in logs and metrics; None stands for a digest."""

    secret: str = field(repr=False)
    name: str | None = None


def is_tenant_name(text: str) -> bool:
    """True for what may name a holder of keys."""
    return re.fullmatch(_NAME, text) is not None and text not in RESERVED


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file, at least one. Empty lines and those that begin with # are passed over.

    Names are 1 to 64 letters, digits, dots, lines or underscores, and stand before ` = `, as a key may hold =
    itself. Keys of one name are one tenant. Raises KeyFileError.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise KeyFileError(f"cannot be read ({type(error).__name__})") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = tuple(_read_line(*each) for each in numbered if each[1] and not each[1].startswith("#"))
    if not keys:
        raise KeyFileError("holds no key, so nobody could be let in")
    return keys


def _read_line(number: int, line: str) -> ApiKey:
    found = _LINE.fullmatch(line)
    if found is None:
        raise KeyFileError(f"line {number} is neither KEY nor NAME = KEY, in printable ASCII")
    name, secret = found.groups()
    if name in RESERVED:
        raise KeyFileError(f"line {number}: the name {name!r} is taken by the metrics")
    return ApiKey(secret, name)
