"""The help texts, made from the settings' own descriptions so that they cannot disagree with them."""

from __future__ import annotations

from typing import Final

from config import Settings
from config.not_yet import is_missing
from config.setting import SECTIONS, SETTINGS, Setting

_COLUMN: Final = 36

MAIN_HELP: Final = """\
usage: slipstream COMMAND [options]

Serves language models over OpenAI-style HTTP.

commands:
  serve [MODEL] [options]           load a model and serve it until Ctrl-C
  config show [--origins] [...]     print the settings that serve would use; takes serve's options
  train-medusa [MODEL] [...]        train Medusa heads, which draft tokens for that model
  bench, chat, doctor               not available yet

options:
  -h, --help                        show this help; serve --help lists every setting
  --version                         show the version
"""

_SERVE_HEAD: Final = """\
usage: slipstream serve [MODEL] [options]

Loads MODEL and serves it over OpenAI-style HTTP until Ctrl-C.

options:
  -h, --help                        show this help
  --config FILE                     TOML file with these settings: [server], then port = 8000, and so on
"""

_SERVE_TAIL: Final = """
* not available yet: asking for it stops the start.

Each setting has one name in three forms; a flag overrides the environment, which overrides the file:
  flag         --max-num-seqs 32
  environment  SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS=32   (short: SLIPSTREAM_HOST, _PORT, _API_KEY, _MODEL)
  TOML file    [scheduler] max-num-seqs = 32
SLIPSTREAM_HOME (~/.cache/slipstream) is where converted models are kept.
"""

SHOW_HELP: Final = """\
usage: slipstream config show [--origins] [MODEL] [serve's options]

Prints the settings that `slipstream serve` would use with the same options, as a TOML file for --config.
Defaults stand in comments; keys are counted, not shown.

options:
  -h, --help                        show this help
  --origins                         say of each value where it came from
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
    if setting.choices:
        text += f": {'|'.join(word + '*' * is_missing(setting.key, word) for word in setting.choices)}"
    elif is_missing(setting.key, object()) or is_missing(setting.key, True):
        text += " *"
    default = setting.spell(setting.field.default)
    return f"  {flag:<{_COLUMN - 4}}  {text}{f' (default: {default})' if default else ''}\n"


def _metavar(setting: Setting) -> str:
    return "WORD" if setting.choices else setting.shape.metavar
