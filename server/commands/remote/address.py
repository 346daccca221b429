"""Where a server is, and with which key: from flags, or from the settings that `serve` would use here."""

from __future__ import annotations

import ipaddress
from argparse import _ActionsContainer
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from config import ServerSettings, SettingsError, load_settings
from config.errors import shown
from server.http.key_file import KeyFileError, read_key_file

_PORTS = {"http": 80, "https": 443}
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # what is listened on is no address to connect to


@dataclass(frozen=True, slots=True)
class Address:
    """An OpenAI-style API; `base` is the path before /chat/completions, such as /v1.

    `api_key` is sent as a bearer token; None sends none. It never shows in a repr.
    """

    scheme: str
    host: str
    port: int
    base: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The base URL, as an OpenAI client takes it."""
        return f"{self.scheme}://{self.netloc}{self.base}"

    @property
    def netloc(self) -> str:
        """Host and port, as in a URL and in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def root(self) -> str:
        """The path under which /tokenize lies: `base` without its /v1."""
        return self.base.removesuffix("/v1")

    @property
    def is_local(self) -> bool:
        """True when nothing that is sent there leaves this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def add_address_flags(parser: _ActionsContainer, *, names_model: bool = True) -> None:
    """--url, --api-key and --api-key-file for `read_address`, and --model where one is to be named."""
    parser.add_argument(
        "--url", metavar="URL", help="the server's base URL (default: where serve listens here)"
    )
    if names_model:
        parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; visible in process lists")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the key")


def read_address(url: str | None, api_key: str | None, api_key_file: Path | None) -> Address:
    """The address that flags name; raises SettingsError.

    Without a URL it is that of a server started here with the same environment. That server's key is used
    when none is given, but never sent to another machine.
    """
    server = load_settings().server
    place = _parse_url(url) if url is not None else _own_address(server)
    if api_key is None and api_key_file is not None:
        api_key = _read_key(api_key_file)
    if api_key is None and server.api_key and place.is_local:
        api_key = server.api_key[0].get_secret_value()
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise SettingsError("the API key cannot be sent in a header; expected printable ASCII")
    return Address(place.scheme, place.host, place.port, place.base, api_key)


def _own_address(server: ServerSettings) -> Address:
    return Address("http", _EVERYWHERE.get(server.host, server.host), server.port or 8000, "/v1")


def _parse_url(url: str) -> Address:
    """The parts of `url`; a URL without a path means its /v1."""
    expected = "expected something like http://127.0.0.1:8000 or https://host/v1"
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise SettingsError(f"flag --url: {shown(url)} is no URL; {expected}") from None
    if parts.scheme not in _PORTS or not host or not text.isascii() or not text.isprintable() or " " in text:
        raise SettingsError(f"flag --url: {shown(url)} cannot be used; {expected}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise SettingsError("flag --url: takes no user name, password, ? or #; keys go into --api-key-file")
    path = parts.path.rstrip("/")
    for endpoint in ("/chat/completions", "/completions"):
        path = path.removesuffix(endpoint)
    return Address(parts.scheme, host, port or _PORTS[parts.scheme], path or "/v1")


def _read_key(path: Path) -> str:
    try:
        return read_key_file(path)[0].secret
    except KeyFileError as error:
        raise SettingsError(f"flag --api-key-file: {path}: {error}") from None
