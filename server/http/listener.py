"""The listening socket: bound before anything is loaded, so that a taken port is known at once."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from engine import StartRefused

GRACE_S = 1  # for last events to reach slow readers; with the drain it must end within docker's ten seconds
_BACKLOG = 2048
# Of one client's unread bytes in the kernel: a few deltas' worth, so that a slow reader's are merged early.
_MAX_UNSENT = 1 << 14


def bind(host: str, port: int, *, listens: bool = True) -> socket.socket:
    """A listening socket on the first address of `host`; port 0 picks a free one. Raises StartRefused.

    Without `listens` it only holds the port, until `listen`.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise StartRefused(f"--host {host}: no such address on this machine.") from None
    listener = socket.socket(family, kind, proto)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None
    listener.setblocking(False)
    if listens:
        listen(listener)
    return listener


def listen(listener: socket.socket) -> None:
    """Take connections from now on. Closed, with StartRefused raised, when another process has come first."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None


def _refusal(host: str, port: int, error: OSError) -> StartRefused:
    if error.errno == errno.EADDRINUSE:
        return StartRefused(
            f"--port {port}: already in use on {host}. Choose another, or 0 for any free one."
        )
    if error.errno == errno.EACCES:
        return StartRefused(f"--port {port}: not allowed on {host}; ports below 1024 need privileges.")
    return StartRefused(f"--host {host} --port {port}: cannot listen there ({error.strerror}).")


def url_of(listener: socket.socket) -> str:
    """Where clients on this machine reach it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_public(listener: socket.socket) -> bool:
    """True when other machines may reach it."""
    return not ipaddress.ip_address(listener.getsockname()[0].split("%")[0]).is_loopback
