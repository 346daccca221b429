"""The commands with their flags, read from where help and parsing have them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from config.setting import SETTINGS, Setting
from server.commands.batch import VERBS, batch_parser
from server.commands.bench.flags import bench_parser
from server.commands.chat_client.command import chat_parser
from server.commands.models import models_parser
from server.commands.pull import pull_parser
from server.commands.run import run_parser
from server.commands.train import TRAIN_DRAFTER, TRAIN_MEDUSA

SHELLS: Final = ("bash", "fish", "zsh")
_PATHS: Final = frozenset({"FILE", "DIR"})


@dataclass(frozen=True, slots=True)
class Flag:
    """`choices` are all values there are, empty where any will do; `help` is one line."""

    word: str
    help: str
    takes_value: bool = False
    is_path: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """`words` are what may stand as an argument; with `takes_path` so may a path."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()
    takes_path: bool = False


def commands() -> tuple[Command, ...]:
    """All of them, in the order of `slipstream --help`."""
    serve = (*(flag for setting in SETTINGS for flag in _of_setting(setting)), _CONFIG)
    own = (Flag("--json", "print the findings as JSON"), Flag("--load", "load the model too"))
    return (
        Command("serve", "load a model and serve it", (*serve, _HELP), takes_path=True),
        Command("run", "talk with a model in this process", (*_of_parser(run_parser()), *serve)),
        Command("doctor", "say what serve would use", (*own, *serve, _HELP), takes_path=True),
        Command("pull", "fetch a model from the Hugging Face hub", _of_parser(pull_parser())),
        Command("models", "list the models on this machine", _of_parser(models_parser())),
        Command("config", "print the settings of serve", (_ORIGINS, *serve, _HELP), ("show",)),
        Command("chat", "talk with a server's model", _of_parser(chat_parser())),
        Command(
            "batch",
            "have a server answer a file of requests",
            _of_parser(batch_parser()),
            VERBS,
            takes_path=True,
        ),
        Command("bench", "measure a server", _of_parser(bench_parser())),
        Command(
            "train-drafter",
            "train a layer that drafts",
            _of_parser(TRAIN_DRAFTER.parser()),
            takes_path=True,
        ),
        Command("train-medusa", "train Medusa heads", _of_parser(TRAIN_MEDUSA.parser()), takes_path=True),
        Command("completion", "print a script that completes commands in a shell", (_HELP,), SHELLS),
    )


_HELP: Final = Flag("--help", "show the help")
_ORIGINS: Final = Flag("--origins", "say of each value where it came from")
_CONFIG: Final = Flag("--config", "TOML file with settings", takes_value=True, is_path=True)


def _of_setting(setting: Setting) -> Sequence[Flag]:
    if setting.flag is None:
        return ()
    text = setting.field.description or ""
    if setting.is_switch:
        return (Flag(setting.flag, text), Flag(f"--no-{setting.word}", f"not: {text}"))
    return (Flag(setting.flag, text, True, setting.shape.metavar in _PATHS, setting.words),)


def _of_parser(parser: argparse.ArgumentParser) -> tuple[Flag, ...]:
    return tuple(
        Flag(
            word,
            " ".join((action.help or "").split()),
            takes_value=action.nargs != 0,
            is_path=action.metavar in _PATHS or action.type is Path,
            choices=tuple(map(str, action.choices or ())),
        )
        for action in parser._actions
        for word in action.option_strings
        if word.startswith("--")
    )
