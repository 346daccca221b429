"""A Hugging Face hub on a socket of this machine: repos of files, and what can go wrong on the way."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
_POLL_S = 0.01  # how often it looks whether to stop
_LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class FakeHub:
    """What it has, by repo and file, and what it was asked; tests change both between requests."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)  # 403 without a reason, to everything
    wrong_digests: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # bytes of each next answer; then it is cut
    held: threading.Event = field(default_factory=threading.Event)  # set where an answer stops for good
    hold_after: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def add(self, repo: str, directory: Path) -> None:
        """Put a directory's files into a repo."""
        files = self.repos.setdefault(repo, {})
        for path in directory.rglob("*"):
            if path.is_file():
                files[path.relative_to(directory).as_posix()] = path.read_bytes()

    def ranges(self, name: str) -> list[str | None]:
        """From where each GET of a file's content began; None: from its beginning."""
        return [where for method, path, where in self.asked if method == "GET" and path.endswith(f"/{name}")]

    def fetched(self) -> list[str]:
        """The names of the files whose content was asked for."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.asked
            if method == "GET" and "/resolve/" in path
        ]

    def tree(self, repo: str) -> list[dict[str, object]]:
        """The listing of a repo, as the hub writes it."""
        return [self._entry(name, content) for name, content in self.repos[repo].items()]

    def _entry(self, name: str, content: bytes) -> dict[str, object]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if name.endswith(_LARGE):
            said = b"something else" if name in self.wrong_digests else content
            digest = hashlib.sha256(said).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that serves until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,))
    thread.start()
    server.hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.hub = FakeHub()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path).lstrip("/")
        hub.asked.append((self.command, path, self.headers.get("range")))
        is_api = path.startswith("api/models/")
        words = path.removeprefix("api/models/").split("/")
        repo, name = "/".join(words[:2]), "/".join(words[4:])
        verb, revision = [*words[2:4], "", ""][:2]
        if (refused := self._refusal(repo, revision, None if is_api else name)) is not None:
            self._say(*refused, b"")
        elif not is_api:
            self._give(name, hub.repos[repo][name])
        elif verb == "tree":
            self._say(200, "", json.dumps(hub.tree(repo)).encode())
        else:
            self._say(200, "", json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())

    do_HEAD = do_GET

    def _refusal(self, repo: str, revision: str, name: str | None) -> tuple[int, str] | None:
        """Status and code, as the hub answers; `name` is a file's, None for its API."""
        hub = self.server.hub
        if repo in hub.forbidden:
            return 403, ""
        if repo not in hub.repos:
            return 401, "RepoNotFound"
        if revision not in ("", "main", COMMIT):
            return 404, "RevisionNotFound"
        if name is not None and repo in hub.gated:
            return 403, "GatedRepo"
        return (404, "EntryNotFound") if name is not None and name not in hub.repos[repo] else None

    def _say(self, status: int, code: str, body: bytes) -> None:
        self.send_response(status)
        if code:
            self.send_header("x-error-code", code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _give(self, name: str, content: bytes) -> None:
        hub = self.server.hub
        begin = int((self.headers.get("range") or "bytes=0-")[len("bytes=") :].partition("-")[0])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("content-range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("etag", hashlib.sha256(content).hexdigest())
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("content-length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = content[begin:]
        cuts = hub.cuts.get(name, [])
        cut = cuts.pop(0) if cuts else hub.hold_after.get(name, len(rest))
        self.wfile.write(rest[:cut])
        if cut < len(rest):
            if name in hub.hold_after:
                hub.held.set()
                self.connection.recv(1)  # until the other side has gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass
