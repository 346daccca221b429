"""The flags of `slipstream bench`: read into a plan, or refused with one line."""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from config import SettingsError
from config.errors import shown
from server.commands.bench.plan import BenchPlan, Lengths, Load, Slos, Workload
from server.commands.command_line import CommandParser, number, whole
from server.commands.remote.address import add_address_flags, read_address

_USAGE: Final = "[--url URL] [--concurrency N | --rate R] [options]"
_DESCRIPTION: Final = """\
Sends streaming requests to an OpenAI-style server and measures what a reader of the streams sees.

  --concurrency C   closed loop: C requests at a time, the next one when one ends
  --rate R          open loop: R requests a second on average, at random (Poisson) times, whatever the server
                    does; times count from when a request was due, so a stalled server shows in full"""
_EXAMPLES: Final = """\
  slipstream bench                                         the server on this machine, 8 requests at a time
  slipstream bench --rate 4 --duration 60 --slo-ttft-ms 500 --slo-itl-ms 80
  slipstream bench --url https://host/v1 --model org/name --api-key-file key.txt --concurrency 32
  slipstream bench --input-tokens 512-2048 --output-tokens 128 --ignore-eos --json report.json --plot out.png

exit code: 0 measured, 1 no request succeeded, 2 wrong usage, 130 interrupted (what was measured is shown)"""

_MANY: Final = 10**7
DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 8, 50


def bench_parser() -> CommandParser:
    """The parser; its help text is the command's."""
    parser = CommandParser("bench", usage=_USAGE, description=_DESCRIPTION, examples=_EXAMPLES)
    server = parser.add_argument_group("server")
    add_address_flags(server)
    server.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="what is asked (default: chat)"
    )
    _add_load_flags(parser)
    _add_workload_flags(parser)
    results = parser.add_argument_group("results")
    limit = number(0, 1e9, above=True)
    results.add_argument("--slo-ttft-ms", type=limit, metavar="MS", help="a good request's first token")
    results.add_argument(
        "--slo-itl-ms", type=limit, metavar="MS", help="a good request's gaps between tokens, 99 %% of them"
    )
    results.add_argument("--json", metavar="FILE", help="write a report, every request in it; - is stdout")
    results.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw charts (png, svg or pdf); needs matplotlib"
    )
    return parser


def _add_load_flags(parser: CommandParser) -> None:
    load = parser.add_argument_group("load")
    count = whole(1, _MANY)
    load.add_argument(
        "--num-requests", type=count, metavar="N", help=f"requests to measure (default: {DEFAULT_REQUESTS})"
    )
    load.add_argument(
        "--duration",
        type=number(0, 1e7, above=True),
        metavar="SECONDS",
        help="begin requests for so long, then let those running finish",
    )
    load.add_argument(
        "--concurrency",
        type=whole(1, 65536),
        metavar="N",
        help=f"requests at a time (default: {DEFAULT_CONCURRENCY})",
    )
    load.add_argument("--rate", type=number(0, 1e6, above=True), metavar="R", help="requests a second")
    load.add_argument(
        "--warmup",
        type=whole(0, _MANY),
        default=1,
        metavar="N",
        help="sent before, not measured (default: 1)",
    )
    load.add_argument(
        "--retry",
        type=whole(0, 100),
        default=0,
        metavar="N",
        help="try a refused request again, when Retry-After says, up to N times (default: 0)",
    )
    load.add_argument(
        "--timeout",
        type=number(0, 1e7, above=True),
        default=600.0,
        metavar="SECONDS",
        help="longest life of a request (default: 600)",
    )


def _add_workload_flags(parser: CommandParser) -> None:
    workload = parser.add_argument_group("requests")
    lengths = workload.add_argument
    lengths("--input-tokens", type=_lengths, metavar="N", help="of the prompt; N or LOW-HIGH (default: 128)")
    lengths("--output-tokens", type=_lengths, metavar="N", help="at most; N or LOW-HIGH (default: 64)")
    lengths("--ignore-eos", action="store_true", help="always make all of them, where the server can")
    lengths(
        "--shared-prefix-tokens",
        type=whole(0, _MANY),
        default=0,
        metavar="N",
        help="that all prompts begin with alike, on top of the input tokens (default: 0)",
    )
    lengths(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='prompts to take in turn: a line {"prompt": ...} or {"messages": ...} each (JSONL)',
    )
    lengths(
        "--temperature",
        type=number(0, 100),
        default=0.0,
        metavar="X",
        help="of sampling (default: 0)",
    )
    lengths(
        "--seed",
        type=whole(0, 2**31 - 1),
        metavar="N",
        help="repeat the prompts, arrival times and sampling of the run that had it (default: a new one)",
    )


def read_plan(argv: Sequence[str]) -> BenchPlan:
    """The plan that `argv` asks for. Raises SettingsError."""
    values = bench_parser().read(argv)
    _check_together(values)
    if values["seed"] is None:  # prompts that were sent before would measure the server's prefix cache
        values["seed"] = secrets.randbelow(2**31)
    prompt_file: Path | None = values["prompt_file"]
    plan = BenchPlan(
        address=read_address(values["url"], values["api_key"], values["api_key_file"]),
        model=values["model"],
        workload=Workload(
            endpoint=values["endpoint"],
            input_tokens=values["input_tokens"] or Lengths(128, 128),
            output_tokens=values["output_tokens"] or Lengths(64, 64),
            prompt_file=prompt_file,
            shared_prefix_tokens=values["shared_prefix_tokens"],
            temperature=values["temperature"],
            ignore_eos=values["ignore_eos"],
            seed=values["seed"],
        ),
        load=_read_load(values),
        slos=Slos(values["slo_ttft_ms"], values["slo_itl_ms"]),
        json=values["json"],
        plot=values["plot"],
    )
    _check_outputs(plan)
    return plan


def _read_load(values: Mapping[str, Any]) -> Load:
    num_requests, concurrency = values["num_requests"], values["concurrency"]
    if num_requests is None and values["duration"] is None:
        num_requests = DEFAULT_REQUESTS
    if concurrency is None and values["rate"] is None:
        concurrency = DEFAULT_CONCURRENCY
    return Load(
        num_requests=num_requests,
        duration_s=values["duration"],
        concurrency=concurrency,
        rate=values["rate"],
        num_warmups=values["warmup"],
        max_retries=values["retry"],
        timeout_s=values["timeout"],
        seed=values["seed"],
    )


_EXCLUSIVE: Final = (
    ("concurrency", "rate", "one keeps so many running, the other starts so many a second"),
    ("num_requests", "duration", "either ends the run"),
    ("prompt_file", "input_tokens", "the file's prompts are as long as they are"),
)


def _check_together(values: Mapping[str, Any]) -> None:
    for first, second, why in _EXCLUSIVE:
        if values[first] is not None and values[second] is not None:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in (first, second))
            raise SettingsError(f"bench: {flags} exclude each other: {why}")


def _check_outputs(plan: BenchPlan) -> None:
    """Refuse now what would fail after minutes of measuring."""
    if plan.plot is not None and find_spec("matplotlib") is None:
        raise SettingsError(
            "bench: --plot needs matplotlib, which is not there; run python -m pip install matplotlib"
        )
    if plan.plot is not None and plan.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SettingsError(f"bench: --plot {plan.plot}: expected a name that ends in .png, .svg or .pdf")
    files = [("--json", Path(plan.json))] if plan.json not in (None, "-") else []
    files += [("--plot", plan.plot)] if plan.plot is not None else []
    for flag, path in files:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise SettingsError(f"bench: {flag} {path}: there is no such directory to write a file into")


def _lengths(text: str) -> Lengths:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text, re.ASCII)
    low = int(match[1]) if match else 0
    high = int(match[2]) if match and match[2] else low
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither a whole number above 0 nor LOW-HIGH")
    return Lengths(low, high)
