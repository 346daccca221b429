"""The command `slipstream pull`: a model from the Hugging Face hub, fetched before it is served."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from config.units import rough_size
from server.commands.command_line import CommandParser, wants_help

OK, REFUSED = 0, 2

_DESCRIPTION: Final = """\
Fetches a model from the Hugging Face hub into its cache, where serve finds it: only the files that serve
reads. What is there is not fetched again, a fetch that was cut off goes on where it ended, and each file is
checked against the digest that the hub names. Prints the path. HF_TOKEN opens gated repos, HF_HUB_CACHE moves
the cache."""
_EXAMPLES: Final = """\
  slipstream pull Qwen/Qwen3-0.6B
  slipstream pull Qwen/Qwen3-0.6B-GGUF:Q8_0                one GGUF file, by its quantization
  slipstream pull Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf
  slipstream serve "Qwen/Qwen3-0.6B-GGUF:Q8_0"             the same name serves it

exit code: 0 it is here, 1 a fault, 2 wrong usage, no network, or a model that is not there or cannot be
served, 130 interrupted"""


def pull_parser() -> CommandParser:
    """The parser; its help text is the command's."""
    parser = CommandParser(
        "pull",
        usage="REPO[:QUANTIZATION|:FILE.gguf] [--revision NAME]",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    parser.add_argument("model", metavar="REPO", help="a Hugging Face repo, and which of its GGUF files")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the repo")
    return parser


def run(argv: Sequence[str]) -> int:
    """Fetch what `argv` asks for; the exit code. Raises SettingsError."""
    if wants_help(argv):
        print(pull_parser().format_help(), end="")
        return OK
    values = pull_parser().read(argv)
    from engine import StartRefused, pull_model

    try:
        path = pull_model(values["model"], values["revision"])
    except StartRefused as refusal:
        print(f"slipstream: {refusal}", file=sys.stderr)
        return REFUSED
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    size = rough_size(sum(each.stat().st_size for each in files))
    print(f"{values['model']}: {size}, whole and checked", file=sys.stderr)
    print(path)
    return OK
