"""The command `slipstream batch`: submits a file of requests to a server, and fetches what came of it."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from config import SettingsError
from config.errors import shown
from server.commands.chat_client.command import explain
from server.commands.command_line import CommandParser, wants_help
from server.commands.remote.address import Address, add_address_flags, read_address
from server.commands.remote.failures import Refused, RemoteError, Unreachable
from server.commands.remote.http_client import BodySink, HttpClient

OK, FAULT = 0, 1
VERBS: Final = ("submit", "status", "fetch", "cancel")
_ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
_LOOK_EVERY_S: Final = 2.0  # the API has nothing to wait on

_DESCRIPTION: Final = """\
Has a server answer a file of requests in seats that nobody else needs: JSON Lines as OpenAI's batch API takes
them, each with custom_id, method, url and body. submit prints the batch's id; status lists batches, or shows
one; fetch prints the answers, and what failed on stderr; cancel ends a batch."""
_EXAMPLES: Final = """\
  slipstream batch submit requests.jsonl --wait > answers.jsonl
  id=$(slipstream batch submit requests.jsonl --window 2h)
  slipstream batch status $id
  slipstream batch fetch $id > answers.jsonl 2> failed.jsonl

exit code: 0 done, 1 the server refused, or the batch failed, 2 wrong usage"""


def batch_parser() -> CommandParser:
    """The parser; its help text is the command's."""
    parser = CommandParser(
        "batch",
        usage="submit FILE | status [ID] | fetch ID | cancel ID",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="submit, status, fetch or cancel")
    parser.add_argument("what", nargs="?", metavar="FILE|ID", help="the requests, or the batch")
    parser.add_argument("--wait", action="store_true", help="after submit: wait for the end, then fetch")
    parser.add_argument("--window", default="24h", metavar="TIME", help="until when the answers are needed")
    add_address_flags(parser, names_model=False)
    return parser


def run(argv: Sequence[str]) -> int:
    """Do what `argv` says; the exit code. Raises SettingsError before anything is sent."""
    if wants_help(argv):
        print(batch_parser().format_help(), end="")
        return OK
    values = batch_parser().read(argv)
    verb, what = values["verb"], values["what"]
    if what is None and verb != "status":
        raise SettingsError(f"batch: {verb} needs {'a FILE' if verb == 'submit' else 'an ID'}")
    content = _read_lines(Path(what)) if verb == "submit" else b""
    address = read_address(values["url"], values["api_key"], values["api_key_file"])
    try:
        return asyncio.run(_obey(address, values, content))
    except RemoteError as error:
        print(f"slipstream: {explain(error, address)}", file=sys.stderr)
        return FAULT


def _read_lines(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"batch: {shown(str(path))} cannot be read: {error.strerror}") from None


async def _obey(address: Address, values: dict[str, Any], content: bytes) -> int:
    verb, what = values["verb"], values["what"]
    with closing(HttpClient(address)) as http:
        server = _Server(http, address.base)
        if verb == "submit":
            batch = await server.submit(Path(what).name, content, values["window"])
            if not values["wait"]:
                print(batch["id"])
                return OK
            print(f"slipstream: {batch['id']} is submitted", file=sys.stderr)
            while batch["status"] not in _ENDED:
                await asyncio.sleep(_LOOK_EVERY_S)
                batch = await server.ask("GET", f"/batches/{batch['id']}")
            return await _print_answers(server, batch)
        if verb == "status" and what is None:
            for batch in (await server.ask("GET", "/batches?limit=100"))["data"]:
                print(_row(batch))
            return OK
        path = f"/batches/{quote(what, safe='')}"
        if verb == "cancel":
            print(_row(await server.ask("POST", f"{path}/cancel")))
            return OK
        batch = await server.ask("GET", path)
        if verb == "fetch":
            return await _print_answers(server, batch)
        print(_row(batch))
        return OK


def _row(batch: dict[str, Any]) -> str:
    """A batch as a line of fields between tabs."""
    counts = batch["request_counts"]
    done = f"{counts['completed']}+{counts['failed']} of {counts['total']}"
    return "\t".join([batch["id"], batch["status"], done, batch["endpoint"]])


async def _print_answers(server: _Server, batch: dict[str, Any]) -> int:
    """Answers to stdout, failures to stderr; the exit code."""
    if batch["status"] not in _ENDED:
        print(f"slipstream: the batch is {batch['status']}: there is nothing to fetch yet", file=sys.stderr)
        return FAULT
    for name, stream in ((batch["output_file_id"], sys.stdout), (batch["error_file_id"], sys.stderr)):
        if name is not None:
            stream.flush()
            stream.buffer.write(await server.content(name))
            stream.buffer.flush()
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "  # none where it is about all lines
        print(f"slipstream: {where}{error['message']}", file=sys.stderr)
    return OK if batch["status"] == "completed" else FAULT


class _Server:
    """The files and batches of one server. All methods raise RemoteError."""

    def __init__(self, http: HttpClient, base: str) -> None:
        self._http = http
        self._base = base

    async def ask(self, method: str, path: str, content: bytes = b"") -> dict[str, Any]:
        """The JSON object that a request is answered with."""
        return _object(await self._http.fetch(method, self._base + path, content))

    async def content(self, file_id: str) -> bytes:
        """What a file holds."""
        reply = await self._http.fetch("GET", f"{self._base}/files/{file_id}/content")
        if reply.status != 200:
            raise Refused(reply.status, reply.headers, bytes(reply.body))
        return bytes(reply.body)

    async def submit(self, name: str, content: bytes, window: str) -> dict[str, Any]:
        """Upload a file and make a batch of it, for the endpoint that its first line names."""
        boundary = secrets.token_hex(24)
        reply = BodySink()
        form = _form(boundary, name, content)
        kind = f"multipart/form-data; boundary={boundary}"
        await self._http.exchange("POST", f"{self._base}/files", form, reply, content_type=kind)
        body = {
            "input_file_id": _object(reply)["id"],
            "endpoint": _endpoint_of(content),
            "completion_window": window,
        }
        return await self.ask("POST", "/batches", json.dumps(body).encode())


def _form(boundary: str, name: str, content: bytes) -> bytes:
    safe = "".join(char if char.isalnum() or char in "._- " else "_" for char in name)
    head = f'--{boundary}\r\ncontent-disposition: form-data; name="'
    start = f'{head}purpose"\r\n\r\nbatch\r\n{head}file"; filename="{safe}"\r\n\r\n'
    return start.encode() + content + f"\r\n--{boundary}--\r\n".encode()


def _endpoint_of(content: bytes) -> str:
    """The url of the first line; where there is none the server says what is wrong with the file."""
    first = content.lstrip().partition(b"\n")[0]
    try:
        url = json.loads(first)["url"]
    except (ValueError, TypeError, KeyError):
        url = None
    return url if isinstance(url, str) else "/v1/chat/completions"


def _object(reply: BodySink) -> dict[str, Any]:
    if reply.status != 200:
        raise Refused(reply.status, reply.headers, bytes(reply.body))
    try:
        found = json.loads(reply.body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreachable("no JSON", "the server's answer is no JSON object")
    return found
