"""Completion of the command line by the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from config.setting import SETTINGS
from server.commands import cli
from server.commands.completion.flag_table import commands
from server.commands.completion.scripts import SCRIPTS

ASKED = {
    "slipstream ser": "serve",
    "slipstream serve --compi": "--compile",
    "slipstream serve --no-prefix-c": "--no-prefix-caching",
    "slipstream serve --cpu-kernels avx": "avx512",
    "slipstream run --tempera": "--temperature",
    "slipstream pull --rev": "--revision",
    "slipstream train-medusa --outp": "--output",
    "slipstream config sho": "show",
    "slipstream completion zs": "zsh",
    "slipstream serve --config sett": "settings.toml",
    "slipstream serve my-mo": "my-model.gguf",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with two files, and the scripts."""
    for name, script in SCRIPTS.items():
        (tmp_path / f"script.{name}").write_text(script(commands()))
    for name in ("settings.toml", "my-model.gguf"):
        (tmp_path / name).touch()
    return tmp_path


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(shell), reason=f"no {shell} is installed (Debian: {shell})")


class Shell:
    """An interactive shell on a terminal; `type` gives what it has on its line once `ends` is there."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder), "PS1": "> "}
            os.execvpe(argv[0], argv, environment)

    def type(self, text: str, ends: str, timeout_s: float = 20.0) -> str:
        """What the shell says from here on until `ends` is in it."""
        os.write(self._terminal, text.encode())
        seen, until = "", time.monotonic() + timeout_s
        while ends not in seen:
            if not select.select([self._terminal], [], [], max(0.0, until - time.monotonic()))[0]:
                raise AssertionError(f"after {text!r} it says {seen!r}, not {ends!r}")
            seen += os.read(self._terminal, 65536).decode(errors="replace").replace("\r", "")
        return seen

    def close(self) -> None:
        os.close(self._terminal)  # hangs up
        os.waitpid(self.pid, 0)


def complete_in(shell: Shell, source: str) -> None:
    shell.type(f"{source}; echo so''urced\n", "sourced")
    for begun, whole in ASKED.items():
        # The shell continues the line: the last word is whole, then its own end or a blank follows.
        rest = whole[len(begun.rpartition(" ")[2]) :]
        assert whole.startswith(begun.rpartition(" ")[2])
        shell.type(f"{begun}\t", begun + rest)
        shell.type("\x15echo c''lear\n", "clear")  # Ctrl-U empties the line


@needs("bash")
def test_in_bash(folder: Path) -> None:
    shell = Shell(["bash", "--norc", "--noprofile", "-i"], folder)
    try:
        complete_in(shell, "source script.bash")
        shell.type("slipstream serve --compile=of\t", "--compile=off")
    finally:
        shell.close()


@needs("zsh")
def test_in_zsh(folder: Path) -> None:
    shell = Shell(["zsh", "-f", "-i"], folder)
    try:
        complete_in(shell, "autoload -Uz compinit; compinit -u -D; source ./script.zsh")
    finally:
        shell.close()


@needs("fish")
def test_in_fish(folder: Path) -> None:
    for begun, whole in ASKED.items():
        program = f"source script.fish; complete -C '{begun}'"
        environment = {**os.environ, "HOME": str(folder)}
        found = subprocess.run(
            ["fish", "--no-config", "-c", program],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        assert whole in [line.partition("\t")[0] for line in found.stdout.splitlines()], begun


def test_every_command_and_every_flag_of_serve_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = {command.name: command for command in commands()}
    assert set(table) == set(cli.COMMANDS)
    words = {flag.word for flag in table["serve"].flags}
    assert {setting.flag for setting in SETTINGS if setting.flag and not setting.is_switch} < words
    for name, command in table.items():
        cli.main([name, "--help"])
        out = capsys.readouterr().out
        for flag in command.flags if name not in ("run", "doctor", "config") else ():
            switch = "--[no-]" + flag.word.removeprefix("--").removeprefix("no-")
            assert flag.word in out or switch in out, (name, flag)


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_it_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell](commands())


def test_another_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err.startswith(
        "slipstream: completion: argument SHELL: invalid choice: 'tcsh'"
    )
