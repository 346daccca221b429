"""The help texts, made from the settings' own descriptions so that they cannot disagree with them."""

from __future__ import annotations

from typing import Final

from config import Settings
from config.setting import SECTIONS, SETTINGS, Setting

_COLUMN: Final = 36

MAIN_HELP: Final = """\
usage: slipstream COMMAND [options]

Serves language models over OpenAI-style HTTP, and has tools for any server that speaks it.

commands:
  serve [MODEL] [options]           load a model and serve it until Ctrl-C
  run [QUESTION] [options]          talk with a model in this process, without a server
  doctor [MODEL] [--load] [...]     say what serve would use, and what would stop it; takes serve's options
  pull REPO[:QUANTIZATION]          fetch a model from the Hugging Face hub, or go on fetching it
  models [--json]                   list the models on this machine and whether they can be served
  config show [--origins] [...]     print the settings that serve would use; takes serve's options
  chat [MESSAGE] [--url URL]        talk with a server's model, on a terminal or in a pipe
  batch submit FILE | status [ID] | fetch ID | cancel ID
                                    have a server answer a file of requests in its free seats
  bench [--url URL] [options]       load a server and measure its latency and throughput
  train-drafter [MODEL] [...]       train a layer that drafts tokens for that model
  train-medusa [MODEL] [...]        train Medusa heads, which draft tokens for that model
  completion SHELL                  print a script that completes all this in bash, fish or zsh

options:
  -h, --help                        show this help; COMMAND --help shows a command's own
  --version                         show the version

examples:
  slipstream run "Why is the sky blue?"
  slipstream serve                  the built-in model on 127.0.0.1:8000
  slipstream chat                   in a second terminal
"""

_SERVE_HEAD: Final = """\
usage: slipstream serve [MODEL] [options]

Loads MODEL and serves it over OpenAI-style HTTP until Ctrl-C.

options:
  -h, --help                        show this help
  --config FILE                     TOML file with these settings: [server], then port = 8000, and so on
"""

_SERVE_TAIL: Final = """
Each setting has one name in three forms; a flag overrides the environment, which overrides the file:
  flag         --max-num-seqs 32
  environment  SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS=32   (short: SLIPSTREAM_HOST, _PORT, _API_KEY, _MODEL)
  TOML file    [scheduler] max-num-seqs = 32
SLIPSTREAM_HOME (~/.cache/slipstream) is where converted models are kept.

examples:
  slipstream serve
  slipstream serve Qwen/Qwen3-0.6B --port 9000 --kv-cache-memory 4GiB
  slipstream serve ./my-model --host 0.0.0.0 --api-key-file keys.txt

exit code: 0 ended by a signal, 1 a fault, 2 wrong usage or settings, or a model that cannot be served
"""

SHOW_HELP: Final = """\
usage: slipstream config show [--origins] [MODEL] [serve's options]

Prints the settings that `slipstream serve` would use with the same options, as a TOML file for --config.
Defaults stand in comments; keys are counted, not shown.

options:
  -h, --help                        show this help
  --origins                         say of each value where it came from

examples:
  slipstream config show --origins
  slipstream config show --max-num-seqs 32 > slipstream.toml
"""


def serve_help() -> str:
    """Every setting on a line of its own, by section."""
    parts = [_SERVE_HEAD]
    for section in SECTIONS:
        title = Settings.model_fields[section].annotation.__doc__ or ""
        parts.append(f"\n{section}: {title.splitlines()[0]}\n")
        parts += [_line(setting) for setting in SETTINGS if setting.section == section]
    return "".join([*parts, _SERVE_TAIL])


def _line(setting: Setting) -> str:
    flag = f"--[no-]{setting.word}" if setting.is_switch else f"--{setting.word} {_metavar(setting)}"
    text = setting.field.description or ""
    if setting.words:
        text += f": {'|'.join(setting.words)}"
    default = setting.spell(setting.field.default)
    return f"  {flag:<{_COLUMN - 4}}  {text}{f' (default: {default})' if default else ''}\n"


def _metavar(setting: Setting) -> str:
    return "WORD" if setting.words else setting.shape.metavar
