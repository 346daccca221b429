"""Many starts of the command in a row, each a process of its own that need not import everything again.

Run as a program it reads JSON, a list of argument lists, each after the most bytes that a file may get, and
writes for each its exit code and what it has said;
-14 is a start that did not end by itself.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

START_S = 60  # for one start, on a machine that has other things to do


class Ended(NamedTuple):
    """How a start ended, and all that it said."""

    code: int
    said: str


def starts(arguments: Mapping[str, Sequence[str]], home: Path, file_bytes: int = 0) -> dict[str, Ended]:
    """What became of `slipstream serve` with each of the arguments, and files of so many bytes at most."""
    from tests.e2e.command_line import QUIET  # not in the program: it would import all of transformers

    program = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([[file_bytes, *each] for each in arguments.values()]),
        capture_output=True,
        text=True,
        env={**QUIET, "SLIPSTREAM_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[2],
        timeout=START_S * (1 + len(arguments)),
        check=False,
    )
    assert program.returncode == 0, program.stderr
    return {name: Ended(*ended) for name, ended in zip(arguments, json.loads(program.stdout), strict=True)}


def main() -> None:
    """Start one after the other."""
    # All that a start needs, as a start imports it.
    from engine.compute.lean_transformers import prepare_transformers

    prepare_transformers()
    import transformers.models.llama.modeling_llama  # noqa: F401

    import engine.compute.embedding.source
    import engine.startup.build  # noqa: F401
    import server.app
    import server.commands.serve  # noqa: F401

    print(json.dumps([_start(each) for each in json.load(sys.stdin)]))


def _start(arguments: Sequence[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            _serve(arguments, said)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode()


def _serve(arguments: Sequence[str], said: IO[bytes]) -> None:
    """In the child: the command, to the end of the process."""
    code = 70
    try:
        for number in (1, 2):
            os.dup2(said.fileno(), number)
        signal.alarm(START_S)
        file_bytes, *words = arguments
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_bytes), int(file_bytes)))
        from server.commands import cli

        code = cli.main(["serve", *words])
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
