"""The command `slipstream models`: what is on this machine, and whether it can be served."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Final

from config import load_settings
from config.units import rough_size
from server.commands.command_line import CommandParser, wants_help

if TYPE_CHECKING:
    from engine import StoredModel

OK: Final = 0

_DESCRIPTION: Final = """\
Lists the models on this machine: in the Hugging Face cache, brought by the installation, and converted copies
under SLIPSTREAM_HOME. NAME is what serve takes. Uses no network. In a pipe each model is a line of fields
between tabs: name, bytes, format, last use, yes or why it cannot be served."""
_EXAMPLES: Final = """\
  slipstream models
  slipstream models --json | jq '.[] | select(.reason == null) | .name'
  slipstream models | cut -f 1                             only the names"""


def models_parser() -> CommandParser:
    """The parser; its help text is the command's."""
    parser = CommandParser("models", usage="[--json]", description=_DESCRIPTION, examples=_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print them as JSON, sizes in bytes")
    return parser


def run(argv: Sequence[str]) -> int:
    """List them; the exit code. Raises SettingsError."""
    if wants_help(argv):
        print(models_parser().format_help(), end="")
        return OK
    values = models_parser().read(argv)
    home = load_settings([]).home
    from engine import list_models

    found, warnings = list_models(home)
    for warning in warnings:
        print(f"slipstream: {warning}", file=sys.stderr)
    if values["json"]:
        json.dump([asdict(each) for each in found], sys.stdout, indent=1)
        print()
    elif sys.stdout.isatty():
        _show(found)
    else:
        for each in found:
            fields = (_name(each), str(each.size_bytes), each.stored, _time(each), each.reason or "yes")
            print("\t".join(" ".join(field.split()) for field in fields))
    return OK


def _show(found: Sequence[StoredModel]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not found:
        console.print("There is no model yet: slipstream pull fetches one.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold", min_width=24)
    table.add_column("SIZE", justify="right", no_wrap=True)
    for title in ("FORMAT", "LAST USE"):
        table.add_column(title, no_wrap=True)
    table.add_column("CAN BE SERVED", overflow="fold", min_width=14)
    for each in found:
        cells = (
            _near_home(_name(each)),
            rough_size(each.size_bytes),
            each.stored,
            _time(each),
            each.reason or "yes",
        )
        table.add_row(*map(Text, cells))
    console.print(table)


def _near_home(path: str) -> str:
    home = os.path.join(os.path.expanduser("~"), "")
    return path.replace(home, "~/", 1) if path.startswith(home) else path


def _name(each: StoredModel) -> str:
    return each.name if each.revision is None else f"{each.name} --revision {each.revision}"


def _time(each: StoredModel) -> str:
    return datetime.fromtimestamp(each.last_used).isoformat(" ", "minutes")
