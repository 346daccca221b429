"""Flags of the commands beside `serve`: a mistake is one line that offers the nearest right word."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from config import SettingsError
from config.errors import closest, did_you_mean, plain, shown


class CommandParser(argparse.ArgumentParser):
    """The parser of `slipstream COMMAND`. Never exits: what is wrong is raised as SettingsError."""

    def __init__(self, command: str, *, usage: str, description: str, examples: str) -> None:
        super().__init__(
            prog=f"slipstream {command}",
            usage=f"slipstream {command} {usage}",
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self._command = command

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values by name. Raises SettingsError."""
        values, left = self.parse_known_args(list(argv))
        for word in left:
            if word.startswith("-"):
                name = word.partition("=")[0]
                known = [flag for action in self._actions for flag in action.option_strings]
                near = did_you_mean(closest(name, known))
                raise SettingsError(
                    f"{self._command}: flag {plain(name)}: unknown flag{near} "
                    f"(see slipstream {self._command} --help)"
                )
            self.error(f"{shown(word)} is one word too many")
        return vars(values)

    def error(self, message: str) -> NoReturn:
        """Raise it, in the words of `serve`."""
        if message.startswith("argument -"):
            message = "flag " + message.removeprefix("argument ")
        message = message.replace(": expected one argument", ": needs a value")
        raise SettingsError(f"{self._command}: {message} (see slipstream {self._command} --help)")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Flags in one column, texts in the other, as in the help of `serve`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def wants_help(argv: Sequence[str]) -> bool:
    """True when `argv` asks for the help text, whatever else is in it."""
    return not {"-h", "--help"}.isdisjoint(argv)


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers from `low` to `high`, for argparse."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {low} to {high}")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """A reader of numbers from `low` to `high`; `above` leaves `low` itself out."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value if above else low <= value) or not value <= high:
            lowest = f"above {low:g}" if above else f"from {low:g}"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number {lowest} to {high:g}")
        return value

    return read
