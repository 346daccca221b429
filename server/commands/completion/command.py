"""The command `slipstream completion`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from server.commands.command_line import CommandParser, wants_help
from server.commands.completion.flag_table import SHELLS, commands
from server.commands.completion.scripts import SCRIPTS

OK: Final = 0

_EXAMPLES: Final = """\
  slipstream completion bash > ~/.local/share/bash-completion/completions/slipstream
  slipstream completion fish > ~/.config/fish/completions/slipstream.fish
  slipstream completion zsh > ~/.zsh/_slipstream           with ~/.zsh in fpath, before compinit
  eval "$(slipstream completion bash)"                     in this shell only"""


def completion_parser() -> CommandParser:
    """The parser; its help text is the command's."""
    parser = CommandParser(
        "completion",
        usage=f"{{{'|'.join(SHELLS)}}}",
        description="Prints a script that completes commands, flags and their values in a shell.",
        examples=_EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, fish or zsh")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the script that `argv` asks for; the exit code. Raises SettingsError."""
    if wants_help(argv):
        print(completion_parser().format_help(), end="")
    else:
        shell = completion_parser().read(argv)["shell"]
        print(SCRIPTS[shell](commands()), end="")
    return OK
