"""The command `slipstream run`: a conversation with a model that this process loads; no server is needed."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

from config import Settings, load_settings
from config.flags import takes_value
from server.commands.chat_client.command import (
    Asked,
    add_conversation_flags,
    read_question,
    talk,
)
from server.commands.command_line import CommandParser, wants_help
from server.commands.event_loop import loop_factory
from server.commands.process_end import leave_others

OK, REFUSED, WRONG_USAGE, INTERRUPTED = 0, 2, 2, 130

_DESCRIPTION: Final = """\
Loads a model in this process and talks with it: no server, no port that others could use, gone at the end.
With QUESTION, or with one in a pipe, it prints the one answer and ends; else it is as slipstream chat.
Takes serve's options, too (serve --help lists them): --model says which model."""
_EXAMPLES: Final = """\
  slipstream run                                           the built-in model
  slipstream run "Why is the sky blue?"
  slipstream run --model Qwen/Qwen3-0.6B --temperature 0 "Name three rivers."
  git diff | slipstream run --system "Write a commit message." --model ./my-model

exit code: 0 ended, 1 the answer failed, 2 wrong usage or a model that cannot be served, 130 interrupted"""
_OWN: Final = frozenset({"--system", "--temperature", "--max-tokens", "--seed"})


def run_parser() -> CommandParser:
    """The parser of what is not serve's; its help text is the command's."""
    parser = CommandParser(
        "run",
        usage="[QUESTION] [--model MODEL] [options]",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="ask this, print the answer, end")
    add_conversation_flags(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Talk as `argv` says; the exit code. Raises SettingsError before anything is loaded.

    Ends the process itself when a load or a step that nothing can interrupt still runs.
    """
    if wants_help(argv):
        print(run_parser().format_help(), end="")
        return OK
    own, others = split_words(argv)
    values = run_parser().read(own)
    settings = load_settings(others)
    asked = read_question(values["question"], "run")
    if asked is None:
        return WRONG_USAGE
    threads = set(threading.enumerate())
    gc.disable()  # until all is loaded, as in `serve`
    try:
        code = _load_and_talk(settings, values, asked)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        gc.enable()
    return leave_others(code, threads)


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of `argv` for our parser, and those that are serve's flags with their values."""
    own: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":  # what follows is no flag, as everywhere
            return [*own, word, *words], others
        name, equals, _ = word.partition("=")
        is_own = name in _OWN or not word.startswith("-") or word == "-"
        (own if is_own else others).append(word)
        has_value = name in _OWN or (not is_own and takes_value(name))
        if has_value and not equals and (value := next(words, None)) is not None:
            (own if is_own else others).append(value)
    return own, others


def _load_and_talk(settings: Settings, values: dict[str, Any], asked: Asked) -> int:
    from engine import StartRefused, prepare_process

    prepare_process()  # before torch is imported
    from server.commands.own_server import OwnServer
    from server.observability.logs import configure_logging

    if "log_level" not in settings.log.model_fields_set:  # what serve tells of requests is of no use here
        settings = settings.model_copy(
            update={"log": settings.log.model_copy(update={"log_level": "warning"})}
        )
    configure_logging(settings.log)
    name = settings.model.served_names[0]
    asked.terminal.note(f"loading {name}")
    server = OwnServer(settings, loop_factory())
    try:
        try:
            address = server.start()
        except StartRefused as refusal:
            print(f"slipstream: {refusal}", file=sys.stderr)
            return REFUSED
        place = f"{name}, in this process"
        return talk(address, {**values, "model": name}, Asked(asked.question, asked.terminal, place))
    finally:
        server.stop()
