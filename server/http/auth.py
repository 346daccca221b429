"""Who may ask: API keys, decided on the path the router sees; closed unless listed open.

A key comes as a Bearer token, or in the header that Anthropic's clients send.

A tenant is the holder of a key, known by the key's name or by a digest that means nothing elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from config import ServerSettings, Settings
from engine import StartRefused
from server.http.context import exchange_of
from server.http.errors import AUTHENTICATION, ErrorReply
from server.http.installation import installation_secret
from server.http.key_file import ApiKey, KeyFileError, is_tenant_name, read_key_file
from server.http.open_tenants import OpenTenants
from server.pages.api_page import SHELL_PATHS

OPEN_PATHS = SHELL_PATHS | {"/", "/health", "/health/live", "/health/ready", "/ping", "/ready"}
METRICS_PATH = "/metrics"
_SCHEME = b"bearer "
_DIGEST_BYTES = 32
_SHOWN_BYTES = 8


class KeyRing:
    """The keys a server accepts, kept as digests under its secret. Empty means that no key is asked for.

    Without the secret, guesses at a key cannot be tried against its tenant's digest.
    """

    def __init__(self, keys: Iterable[ApiKey], secret: bytes) -> None:
        self._secret = secret
        self._tenants: dict[bytes, str] = {}
        for key in keys:
            digest = self._digest(key.secret.encode())
            self._tenants[digest] = key.name or self._tenants.get(digest) or digest[:_SHOWN_BYTES].hex()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def owner(self) -> str | None:
        """The tenant of the first key, which is the server's own; None without keys."""
        return next(iter(self._tenants.values()), None)

    @property
    def is_one(self) -> bool:
        """True where one key serves all."""
        return len(self._tenants) == 1

    def label(self, name: str) -> str:
        """What stands for a name that a client gives, in logs and metrics, too."""
        return self._digest(b"name " + name.encode("utf-8", "surrogatepass"))[:_SHOWN_BYTES].hex()

    def tenant_of(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """A name for the one key in the headers, None when it is missing or wrong, or there are two.

        Takes the same time for every wrong key.
        """
        sent = _keys_in(headers)
        if len(sent) != 1 or sent[0] is None:
            return None
        digest = self._digest(sent[0])
        matches = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, digest)]
        return matches[0] if matches else None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=_DIGEST_BYTES, key=self._secret).digest()


def _keys_in(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
    """Every key that is sent, one sent in both headers once; None for an Authorization of another kind."""
    found: list[bytes | None] = []
    for name, value in headers:
        if name == b"authorization":
            is_bearer = value.lower().startswith(_SCHEME)
            found.append(value[len(_SCHEME) :].strip() if is_bearer else None)
    for name, value in headers:
        if name == b"x-api-key" and found != [value.strip()]:
            found.append(value.strip())
    return found


def read_keys(settings: ServerSettings) -> tuple[ApiKey, ...]:
    """The keys given directly and those in the key file. Raises StartRefused."""
    keys = tuple(ApiKey(key.get_secret_value()) for key in settings.api_key)
    if settings.api_key_file is None:
        return keys
    try:
        return keys + read_key_file(settings.api_key_file)
    except KeyFileError as error:
        raise StartRefused(f"--api-key-file {settings.api_key_file}: {error}.") from error


def key_ring(settings: Settings) -> KeyRing:
    """The keys that `settings` name. Raises StartRefused."""
    keys = read_keys(settings.server)
    names_tenants = keys or settings.scheduler.tenant_header is not None
    secret = installation_secret(settings.home, settings.server.state_dir) if names_tenants else b""
    return KeyRing(keys, secret)


class AuthMiddleware:
    """Lets nothing but the open paths through without a key, and says whose a request is.

    A trusted gateway names the tenant in `tenant_header`. Where one key serves all, its holder may name users
    in the body, who are tenants for turns and places; what is kept is the key's all the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        protect_metrics: bool,
        tenants: OpenTenants,
        tenant_header: str | None = None,
    ) -> None:
        self.app = app
        self._tenant_header = None if tenant_header is None else tenant_header.encode()
        self._keys = keys
        self._tenants = tenants
        self._open_paths = OPEN_PATHS if protect_metrics else OPEN_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it before its body is read."""
        tenant = None
        if self._asks(scope):
            tenant = self._keys.tenant_of(scope["headers"])
            if tenant is None:
                await _refusal().send(scope, receive, send)
                return
        named = self._named(scope)
        if scope["type"] == "http":
            exchange_of(scope).holds_server_key = named is None and tenant == self._keys.owner
        tenant = named or tenant
        if tenant is None:
            await self.app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        exchange.tenant = tenant
        exchange.tenant_of_user = self._keys.label if self._keys.is_one else None
        with self._tenants.serving(tenant):
            await self.app(scope, receive, send)

    def _named(self, scope: Scope) -> str | None:
        """The tenant that a gateway names, by a digest unless it is a name as in a key file."""
        if self._tenant_header is None or scope["type"] != "http" or exchange_of(scope).is_background:
            return None
        sent = [value for name, value in scope["headers"] if name == self._tenant_header and value.strip()]
        if len(sent) != 1:
            return None
        name = sent[0].strip().decode("latin-1")
        return name if is_tenant_name(name) else self._keys.label(name)

    def _asks(self, scope: Scope) -> bool:
        """Whether the request needs a key; a line of a batch was sent with one."""
        if not self._keys or scope["type"] != "http" or scope["path"] in self._open_paths:
            return False
        return not exchange_of(scope).is_background


def _refusal() -> ErrorReply:
    message = "No valid API key was sent: use the header 'authorization: Bearer KEY' or 'x-api-key: KEY'."
    headers = {"www-authenticate": "Bearer"}
    return ErrorReply(401, AUTHENTICATION, message, code="invalid_api_key", headers=headers)
