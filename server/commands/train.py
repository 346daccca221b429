"""The commands `slipstream train-drafter` and `train-medusa`: flags to a plan, and the life of the run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

from config import Settings, SettingsError, load_settings
from config.setting import SETTINGS

OK, FAULT, REFUSED, INTERRUPTED = 0, 1, 2, 130

_MEDUSA: Final = """\
Trains Medusa heads for MODEL, for `slipstream serve --medusa-heads DIR`: the model answers prompts, and small
heads learn from its hidden states to guess the tokens after the next one.

Ctrl-C keeps what there is: the samples, which the same command goes on from, and the heads as far as they are
trained. DIR gets the heads, report.json and the samples, which may be deleted."""

_DRAFTER: Final = """\
Trains a drafter of one decoder layer for MODEL (EAGLE-3), for `slipstream serve --draft-heads DIR`: the model
answers prompts, and the layer learns from what enters three of its layers to go on for several tokens.

Ctrl-C keeps what there is: answers, what the model makes of them, and a checkpoint, from which the same
command goes on, and the drafter as far as it is trained. DIR gets the drafter, report.json and samples/,
which may be deleted: with the default model it has 5 KB a token."""


class _Number(NamedTuple):
    """A flag with a number, the plan's field that it sets, and its limits; `default` None leaves it open."""

    flag: str
    field: str
    default: int | None
    low: float
    high: float
    text: str
    is_whole: bool = True

    def read(self, text: str) -> float:
        """The value. Raises ArgumentTypeError."""
        try:
            value = int(text) if self.is_whole else float(text)
        except ValueError:
            value = None
        if value is None or not self.low <= value <= self.high:
            kind = "a whole number" if self.is_whole else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {self.low:g} to {self.high:g}")
        return value


def _numbers(tokens: int, token_ids: int, epochs: int, answer: int, batch: int) -> tuple[_Number, ...]:
    """The numbers that every plan has, with these defaults."""
    return (
        _Number("--tokens", "num_tokens", tokens, 1, 1e9, "tokens that the model generates to learn from"),
        _Number(
            "--token-ids",
            "num_token_ids",
            token_ids,
            16,
            1e6,
            "how many tokens, the most frequent, are guessed",
        ),
        _Number("--epochs", "num_epochs", epochs, 1, 1000, "passes over the samples"),
        _Number("--max-new-tokens", "max_new_tokens", answer, 8, 1e6, "longest answer to a prompt"),
        _Number("--batch-size", "batch_size", batch, 1, 1024, "prompts answered at a time"),
        _Number("--seed", "seed", 0, 0, 2**63 - 1, "equal seeds train equally"),
        _Number(
            "--minutes", "minutes", None, 0.01, 1e6, "end after about so long, generating included", False
        ),
        _Number("--threads", "threads", None, 1, 1024, "CPU threads (default: one a core)"),
    )


@dataclass(frozen=True, slots=True)
class TrainCommand:
    """One of the commands: its name, help, the numbers it takes, and what it calls that which it trains."""

    name: str
    description: str
    numbers: tuple[_Number, ...]
    product: str

    def parser(self) -> argparse.ArgumentParser:
        """The parser; its help text is the command's."""
        parser = _Parser(
            prog=f"slipstream {self.name}",
            usage=f"slipstream {self.name} [MODEL] --output DIR [options]",
            description=self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add = parser.add_argument
        add("model", nargs="?", metavar="MODEL", help="as for serve (default: the built-in one)")
        add("--output", type=Path, required=True, metavar="DIR", help=f"where the {self.product} go")
        add(
            "--prompts",
            type=Path,
            metavar="FILE",
            help="prompts in place of the built-in ones: one a line, as text or as JSON with messages",
        )
        for number in self.numbers:
            shown = "" if number.default is None else f" (default: {number.default})"
            add(
                number.flag,
                dest=number.field,
                type=number.read,
                default=number.default,
                metavar="N",
                help=number.text + shown,
            )
        for setting in _MODEL_SETTINGS:
            text = f"{setting.field.description}, as for serve"
            metavar = "WORD" if setting.words else setting.shape.metavar
            add(f"--{setting.word}", dest=setting.name, metavar=metavar, help=text)
        return parser


_MODEL_SETTINGS: Final = tuple(
    setting
    for setting in SETTINGS
    if setting.section == "model"
    and setting.name in ("dtype", "device", "max_model_len", "revision", "chat_template")
)


class _Parser(argparse.ArgumentParser):
    """Mistakes become SettingsError, one line like everywhere else."""

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        name = self.prog.removeprefix("slipstream ")
        raise SettingsError(f"{name}: {message} (see {self.prog} --help)")


TRAIN_MEDUSA: Final = TrainCommand(
    "train-medusa",
    _MEDUSA,
    (
        *_numbers(tokens=150_000, token_ids=8192, epochs=8, answer=256, batch=32),
        _Number("--heads", "num_heads", 4, 1, 32, "how many tokens ahead are guessed, one head each"),
    ),
    "heads",
)
TRAIN_DRAFTER: Final = TrainCommand(
    "train-drafter",
    _DRAFTER,
    (
        *_numbers(tokens=600_000, token_ids=8192, epochs=12, answer=384, batch=48),
        _Number(
            *("--own-prompts", "num_own_prompts", 2000, 0, 1e6),
            "prompts that the model writes itself, beside the others; 0 for none",
        ),
        _Number("--steps", "num_steps", 4, 1, 8, "for how many tokens it learns to go on by itself"),
        _Number("--window", "window", 512, 16, 1e6, "positions that it sees of what went before"),
    ),
    "drafter's files",
)


def run(command: TrainCommand, argv: Sequence[str]) -> int:
    """Train as `argv` says; the exit code. Raises SettingsError before anything heavy is imported.

    0 done, 1 a fault, 2 the model, the prompts or the samples cannot be used, 130 ended by Ctrl-C.
    """
    parser = command.parser()
    if {"-h", "--help"}.intersection(argv):
        print(parser.format_help(), end="")
        return OK
    values = vars(parser.parse_args(list(argv)))
    settings = load_settings(_model_flags(values))
    names = [number.field for number in command.numbers] + ["output", "prompts"]
    return _train(command, settings, {name: values[name] for name in names})


def _train(command: TrainCommand, settings: Settings, values: Mapping[str, Any]) -> int:
    from engine import (
        DrafterPlan,
        MedusaPlan,
        StartRefused,
        prepare_process,
        train_drafter,
        train_medusa_heads,
    )
    from server.commands.train_display import Display, show_drafter_report, show_medusa_report
    from server.observability.logs import configure_logging

    prepare_process()
    configure_logging(settings.log)
    output: Path = values["output"]
    try:
        with Display() as display, _stopping_on_interrupt(display.stop):
            if command is TRAIN_MEDUSA:
                report = train_medusa_heads(settings, MedusaPlan(**values), display)
            else:
                report = train_drafter(settings, DrafterPlan(**values), display)
    except StartRefused as refusal:
        print(f"slipstream: {refusal}", file=sys.stderr)
        return REFUSED
    if report is None:
        print(
            "Stopped before training; the same command goes on with the samples there are.", file=sys.stderr
        )
        return INTERRUPTED
    show = show_medusa_report if command is TRAIN_MEDUSA else show_drafter_report
    show(report, output)
    return INTERRUPTED if display.is_stopped() else OK


@contextmanager
def _stopping_on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """While entered, the first Ctrl-C calls `stop` and a second one interrupts."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _model_flags(values: Mapping[str, Any]) -> list[str]:
    """The flags of `serve` that name the model and say how it is loaded."""
    flags = [] if values["model"] is None else [values["model"]]
    given = [setting for setting in _MODEL_SETTINGS if values[setting.name] is not None]
    return flags + [f"--{setting.word}={values[setting.name]}" for setting in given]
