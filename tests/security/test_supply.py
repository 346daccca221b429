"""Nothing in the product turns bytes into code, and a server speaks to nobody but its clients."""

from __future__ import annotations

import ast
import importlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.server_process import server_process
from tests.e2e.wire import ask
from tests.support.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for part in ("config", "engine", "server") for path in (ROOT / part).rglob("*.py"))
FORBIDDEN_MODULES = frozenset(
    ("cloudpickle", "code", "dill", "imp", "joblib", "marshal", "pickle", "runpy", "shelve", "subprocess")
)
FORBIDDEN_CALLS = frozenset(("__import__", "compile", "eval", "exec", "import_module"))
FORBIDDEN_METHODS = frozenset(
    (
        ("torch", "load"),
        ("torch", "save"),
        ("np", "load"),
        ("numpy", "load"),
        ("os", "system"),
        ("os", "popen"),
    )
)
COMPILER = "engine/compute/native/compiler.py"
FORBIDDEN_TRUE = frozenset(("trust_remote_code", "allow_pickle"))


def forbidden(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each line that could run what somebody else has written, and what it uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [each.name for each in names if each.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)):
                found = [module] if module.split(".")[0] in FORBIDDEN_MODULES else []
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found = [name]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in FORBIDDEN_METHODS:
                found = [f"{owner}.{name}"]
            case ast.Attribute(attr="import_module"):
                found = ["import_module"]
            case ast.keyword(arg=str(name), value=value) if name in FORBIDDEN_TRUE:
                found = [] if isinstance(value, ast.Constant) and value.value is False else [name]
            case _:
                found = []
        yield from ((getattr(node, "lineno", 0), each) for each in found)


def test_nothing_turns_bytes_into_code() -> None:
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in SOURCES
        for line, what in forbidden(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert [each for each in found if each.split(":")[0] != COMPILER] == []


def test_only_the_compiler_of_our_own_kernels_runs_a_program() -> None:
    """It is told our own source, our own flags and a path below its home; no shell sees any of it."""
    tree = ast.parse((ROOT / COMPILER).read_text(encoding="utf-8"))
    assert {what for _, what in forbidden(tree)} == {"subprocess"}
    runs = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess.")
    ]
    assert [ast.unparse(each.func) for each in runs] == ["subprocess.run"]
    assert not any(keyword.arg == "shell" for each in runs for keyword in each.keywords)
    assert any(ast.unparse(node).startswith("SOURCE = Path(__file__)") for node in tree.body)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, cloudpickle.sub",
        "from marshal import loads",
        "eval('1')",
        "exec(text)",
        "__import__('os')",
        "importlib.import_module(name)",
        "torch.load(path)",
        "load = torch.load",
        "os.system('true')",
        "np.load(path)",
        "from_pretrained(x, trust_remote_code=True)",
        "from_pretrained(x, trust_remote_code=settings.trust)",
        "f(allow_pickle=True)",
    ],
)
def test_what_is_forbidden_is_found(line: str) -> None:
    assert list(forbidden(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["model.eval()", "re.compile(x)", "torch.compile(f)", "f(trust_remote_code=False)"]
)
def test_what_only_looks_like_it_is_not(line: str) -> None:
    assert not list(forbidden(ast.parse(line)))


PIECES = (
    "a",
    " ",
    "0",
    '"',
    "\\",
    "{",
    "[",
    "%",
    ":",
    "<",
    "a ",
    '\\"',
    "{:",
    "%0",
    "[{",
    "\n",
    "x1",
    "é",
    "*",
)
LONG = 10_000  # characters; in quadratic time, tenths of a second or more
# The first reads a page of ours, the other is matched at the beginning or in a run whose strings all end.
NOT_SEARCHED = ("server.pages.page._PART", "server.http.json_parts._WHOLE_STRING")


def patterns() -> dict[str, re.Pattern[Any]]:
    """Every regular expression that a module of ours has compiled."""
    found: dict[str, re.Pattern[Any]] = {}
    for path in SOURCES:
        if "re.compile" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for name, value in vars(module).items():
                if isinstance(value, re.Pattern):
                    found[f"{module.__name__}.{name}"] = value
    return found


def test_expressions_over_texts_of_clients_do_not_backtrack() -> None:
    assert len(patterns()) > 10
    slow = {}
    for name, pattern in patterns().items():
        if name in NOT_SEARCHED:
            continue
        for piece in PIECES:
            for start in ("", "{", "%", '"', "a"):
                text: Any = start + piece * (LONG // len(piece)) + "!"
                text = text.encode() if isinstance(pattern.pattern, bytes) else text
                started = time.thread_time()
                pattern.search(text)
                if time.thread_time() - started > 0.1:
                    slow[name] = piece
    assert slow == {}


# Runs the command behind it with an ear for what the interpreter asks of the network and of other programs.
LISTENER = """
import json, sys
asked = open(sys.argv[1], "a", buffering=1)
events = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
          "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "ctypes.dlopen")
def hear(event, details):
    if event in events:
        print(json.dumps([event, repr(details)]), file=asked)
sys.addaudithook(hear)
sys.argv = ["slipstream", *sys.argv[sys.argv.index("serve"):]]
from server.commands.cli import main
sys.exit(main())
"""


async def test_a_server_has_one_listener_and_asks_nobody_anything(tmp_path: Path) -> None:
    model, heard = save_tiny_model("llama", tmp_path / "model"), tmp_path / "heard"
    async with server_process(
        model, "--kv-cache-memory", "16MiB", under=(sys.executable, "-c", LISTENER, str(heard))
    ) as server:
        await server.until_ready()
        port = int(server.url.rpartition(":")[2])
        reply = await ask(server.url, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert reply.status == 200
        messages = [{"role": "user", "content": "see http://127.0.0.1:9/picture.png"}]
        chat = {"messages": messages, "max_tokens": 2, "speculation": {"enabled": True}}
        assert (await ask(server.url, "POST", "/v1/chat/completions", chat)).status == 200
        process = psutil.Process(server.process.pid)
        sockets = process.net_connections(kind="all")
        listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
        assert [tuple(each) for each in listening] == [("127.0.0.1", port)]
        elsewhere = [each for each in sockets if each.raddr and tuple(each.laddr)[1:] != (port,)]
        assert elsewhere == []
        assert process.children(recursive=True) == []
        server.signal(signal.SIGTERM)
        assert await server.exit_code(60) == 0
    events = [json.loads(line) for line in heard.read_text().splitlines()]
    names = {name for name, _ in events} - {"ctypes.dlopen"}
    assert names <= {"socket.bind", "socket.getaddrinfo"}, events
    assert [details for name, details in events if name == "socket.bind"] != []
    assert all("127.0.0.1" in details for name, details in events if name.startswith("socket."))
