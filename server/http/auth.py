"""Who may ask: API keys by Bearer token, decided on the path the router sees; closed unless listed open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from config import ServerSettings
from engine import StartRefused
from server.http.context import exchange_of
from server.http.errors import AUTHENTICATION, ErrorReply

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/ping", "/ready"})
METRICS_PATH = "/metrics"
_SCHEME = b"bearer "


class KeyRing:
    """The keys a server accepts, kept as digests. Empty means that no key is asked for."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple({_digest(key.encode()) for key in keys})

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """A name for the key in the one Authorization header, None when it is missing or wrong.

        Takes the same time for every wrong key.
        """
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1 or not values[0].lower().startswith(_SCHEME):
            return None
        digest = _digest(values[0][len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(known, digest) for known in self._digests]
        return digest.hex()[:16] if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(settings: ServerSettings) -> tuple[str, ...]:
    """The keys given directly and those in the key file, one a line. Raises StartRefused."""
    keys = tuple(key.get_secret_value() for key in settings.api_key)
    if settings.api_key_file is None:
        return keys
    lines = _read_lines(settings.api_key_file)
    from_file = tuple(line.strip() for line in lines if line.strip())
    if not from_file:
        raise StartRefused(
            f"--api-key-file {settings.api_key_file}: holds no key, so nobody could be let in."
        )
    return keys + from_file


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartRefused(f"--api-key-file {path}: cannot be read ({type(error).__name__}).") from error


class AuthMiddleware:
    """Lets nothing but the open paths through without a key."""

    def __init__(self, app: ASGIApp, keys: KeyRing, protect_metrics: bool) -> None:
        self.app = app
        self._keys = keys
        self._open_paths = OPEN_PATHS if protect_metrics else OPEN_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it before its body is read."""
        if self._keys and scope["type"] == "http" and scope["path"] not in self._open_paths:
            tenant = self._keys.tenant_of(scope["headers"])
            if tenant is None:
                await _refusal().send(scope, receive, send)
                return
            exchange_of(scope).tenant = tenant
        await self.app(scope, receive, send)


def _refusal() -> ErrorReply:
    message = "No valid API key was sent: use the header 'authorization: Bearer KEY'."
    headers = {"www-authenticate": "Bearer"}
    return ErrorReply(401, AUTHENTICATION, message, code="invalid_api_key", headers=headers)
