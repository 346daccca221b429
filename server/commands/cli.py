"""The command `slipstream`. Imports nothing heavy until a command needs it."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from config import SettingsError, load_settings, load_with_origins
from config.errors import closest, did_you_mean, plain
from config.toml_file import format_toml
from server.commands.cli_help import MAIN_HELP, SHOW_HELP, serve_help

OK: Final = 0
FAULT: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130

_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_HELP: Final = frozenset({"-h", "--help"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: this process's) and return the exit code.

    0 well ended, 1 a failure as the command's help says, 2 wrong usage or settings (one line on stderr),
    130 interrupted.
    """
    _open_closed_streams()
    _spell_out_what_cannot_be_shown()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        _forget_output()
        return FAULT
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        _forget_output()
        print(f"slipstream: nothing more can be written: {error.strerror}", file=sys.stderr)
        return FAULT
    except SettingsError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream was closed, or the first socket would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def _spell_out_what_cannot_be_shown() -> None:
    """Have a name that the output's encoding lacks written as escapes, which TOML and JSON read, too."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _forget_output() -> None:
    """Lead stdout to nowhere, so that what is left of it fails no second time when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(MAIN_HELP, end="", file=sys.stderr)
        return WRONG_USAGE
    name, *rest = words
    if name in _HELP:
        print(MAIN_HELP, end="")
        return OK
    if name == "--version":
        print(f"slipstream {_version()}")
        return OK
    command = COMMANDS.get(name)
    if command is None:
        near = closest(name, [*COMMANDS, "--help", "--version"])
        raise SettingsError(f"unknown command {plain(name)}{did_you_mean(near)} (see slipstream --help)")
    return command(rest)


def serve(argv: Sequence[str]) -> int:
    """Load a model and serve it until a signal ends it. Raises SettingsError before anything is loaded."""
    if _HELP.intersection(argv):
        print(serve_help(), end="")
        return OK
    settings = load_settings(argv)
    _leave_on_signals()
    gc.disable()  # until all is loaded: what is imported stays, and to look for garbage in it takes long
    try:
        # Only now: the model libraries take seconds to import, and a wrong flag should not wait for them.
        from server.observability.logs import adopt_library_loggers, configure_logging

        configure_logging(settings.log, never_waits=True)
        from server.commands.serve import run

        adopt_library_loggers()
        return run(settings)
    finally:
        gc.enable()


def _leave_on_signals() -> None:
    """Until the server handles its signals there is nothing to finish: leave as it would without work."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(OK))


def config_show(argv: Sequence[str]) -> int:
    """Print the settings `serve` would use. Raises SettingsError."""
    verb, *rest = argv or [""]
    if _HELP.intersection(argv):
        print(SHOW_HELP, end="")
        return OK
    if verb != "show":
        raise SettingsError("config: expected slipstream config show [--origins]")
    loaded = load_with_origins([word for word in rest if word != "--origins"])
    print(format_toml(*loaded, with_origins="--origins" in rest), end="")
    return OK


def train_medusa(argv: Sequence[str]) -> int:
    """Train Medusa heads for a model. Raises SettingsError before anything is loaded."""
    from server.commands.train import TRAIN_MEDUSA, run

    return run(TRAIN_MEDUSA, argv)


def train_drafter(argv: Sequence[str]) -> int:
    """Train a drafter of one layer for a model. Raises SettingsError before anything is loaded."""
    from server.commands.train import TRAIN_DRAFTER, run

    return run(TRAIN_DRAFTER, argv)


def bench(argv: Sequence[str]) -> int:
    """Measure a server. Raises SettingsError before anything is sent."""
    from server.commands.bench.command import run

    return run(argv)


def chat(argv: Sequence[str]) -> int:
    """Talk with a server's model. Raises SettingsError before anything is sent."""
    from server.commands.chat_client.command import run

    return run(argv)


def batch(argv: Sequence[str]) -> int:
    """Submit a file of requests, or fetch the answers. Raises SettingsError before anything is sent."""
    from server.commands.batch import run

    return run(argv)


def run(argv: Sequence[str]) -> int:
    """Talk with a model that this process loads. Raises SettingsError before anything is loaded."""
    from server.commands.run import run as talk

    return talk(argv)


def doctor(argv: Sequence[str]) -> int:
    """Say what `serve` would use, and what would stop it. Raises SettingsError."""
    from server.commands.doctor.command import run

    return run(argv)


def models(argv: Sequence[str]) -> int:
    """List the models on this machine. Raises SettingsError."""
    from server.commands.models import run

    return run(argv)


def pull(argv: Sequence[str]) -> int:
    """Fetch a model from the Hugging Face hub. Raises SettingsError before anything is asked."""
    from server.commands.pull import run

    return run(argv)


def completion(argv: Sequence[str]) -> int:
    """Print a script that completes commands in a shell. Raises SettingsError."""
    from server.commands.completion.command import run

    return run(argv)


def _version() -> str:
    try:
        return version("slipstream")
    except PackageNotFoundError:
        return "(not installed)"


COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = {
    "serve": serve,
    "run": run,
    "config": config_show,
    "train-drafter": train_drafter,
    "train-medusa": train_medusa,
    "bench": bench,
    "chat": chat,
    "batch": batch,
    "doctor": doctor,
    "models": models,
    "pull": pull,
    "completion": completion,
}
