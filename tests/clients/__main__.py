"""Starts both servers and runs `cases` with the Python that has the clients: `make test-clients`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.scripted import ScriptedEngine
from tests.e2e.http_server import server_url
from tests.e2e.server_process import server_process

DEFAULT_MODEL = "smollm2-135m-instruct"
CASES = Path(__file__).parent / "cases"


async def run(python: str, arguments: list[str]) -> int:
    """The exit code of the cases: 0 when every client got what it expects."""
    with TemporaryDirectory() as home:
        return await _run(python, arguments, Path(home))


async def _run(python: str, arguments: list[str], home: Path) -> int:
    async with (
        server_url(ScriptedEngine(), ollama_api=True) as scripted,
        server_process(DEFAULT_MODEL, "--ollama-api", home=home) as server,
    ):
        await server.until_ready()
        command = (python, "-m", "pytest", "-c", str(CASES / "pytest.ini"), "--rootdir", str(CASES))
        cut = ("--confcutdir", str(CASES))  # the conftest of the other tests needs what they need
        urls = ("--scripted-url", scripted, "--default-url", server.url)
        converted = next((home / "models").iterdir())
        given = (*urls, "--tokenizer", str(converted), *arguments)
        process = await asyncio.create_subprocess_exec(*command, *cut, str(CASES), *given)
        return await process.wait()


def main() -> None:
    """The first argument is the Python that has the clients; the others go to pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("python")
    given, arguments = parser.parse_known_args()
    sys.exit(asyncio.run(run(given.python, arguments)))


if __name__ == "__main__":
    main()
