"""installation_secret: secret random bytes, for digests of what must not be guessed."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("slipstream.server")

SECRET_BYTES = 32
_NAME = "installation-secret"


def installation_secret(home: Path, state: Path | None = None) -> bytes:
    """The secret kept below `home`, made at the first call; one of this process's own if that fails.

    Where `state` has what belongs to tenants, it has the secret as well, and that one counts: it may outlive
    `home`. Of several processes that make it at once one wins, and all get its secret. Never raises.
    """
    secret = None
    for folder in (home,) if state is None else (home, state):
        path = folder / _NAME
        try:
            if not path.exists():
                _make(path, secret or secrets.token_bytes(SECRET_BYTES))
            secret = _read(path)
        except OSError as error:
            reason = f"{path}: {error.strerror}"
    if secret is None:
        log.info("tenants get other digests at each start: %s", reason)
        return secrets.token_bytes(SECRET_BYTES)
    return secret


def _make(path: Path, secret: bytes) -> None:
    """Write a secret atomically, readable by its owner only, unless there is one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            os.link(unfinished, path)
    finally:
        unfinished.unlink()


def _read(path: Path) -> bytes:
    """The secret in the file. Raises OSError, also if another user may have made it or can read it."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if os.name == "posix" and (found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o007):
            raise PermissionError(0, "it is another user's or open to all")
        content = file.read(SECRET_BYTES + 1)
    if len(content) != SECRET_BYTES:
        raise OSError(0, f"it has not {SECRET_BYTES} bytes")
    return content
