"""The command `python -m tests.bench`: measure what was asked for, print tables, keep JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from config import load_settings
from tests.bench.attention import run_attention
from tests.bench.batches import run_batches
from tests.bench.context import BenchContext
from tests.bench.crowd import run_crowd
from tests.bench.deadlines import run_deadlines
from tests.bench.decode import run_decode
from tests.bench.delayed import run_delayed
from tests.bench.embeddings import run_embeddings
from tests.bench.families import run_families
from tests.bench.gguf import run_gguf
from tests.bench.host import run_host
from tests.bench.hybrid import run_hybrid
from tests.bench.kernels import run_kernels
from tests.bench.kv import run_kv
from tests.bench.load import run_load
from tests.bench.machine import REPOSITORY, CpuWatch, about
from tests.bench.memory import run_memory
from tests.bench.moe import run_moe
from tests.bench.neighbours import run_neighbours
from tests.bench.peer import Peer
from tests.bench.peers import run_peers, run_repetitive
from tests.bench.processes import end_in_order
from tests.bench.quantization import run_quantization
from tests.bench.report import Section, bars_table, report_json
from tests.bench.restart import run_restart
from tests.bench.scale import run_scale
from tests.bench.scrape import run_scrape
from tests.bench.speculation import run_speculation
from tests.bench.start import run_start
from tests.bench.stated_asking import run_stated_asking
from tests.bench.stated_pair import run_stated_pair
from tests.bench.streams import BenchmarkFailed
from tests.bench.ttft import run_ttft
from tests.bench.turns import run_turns

PLAIN_WIDTH = 120  # columns, where no terminal says how many there are
PEER_HELP = (
    "an engine for peers; repeatable. HOW is a URL, a command with {port} that serves OpenAI completions,"
    " or a command that answers lines of JSON; {model} in it is the directory of the model"
)
Benchmark = Callable[[BenchContext], list[Section]]

BENCHMARKS: dict[str, Benchmark] = {
    "start": run_start,
    "memory": run_memory,
    "host": run_host,
    "decode": run_decode,
    "attention": run_attention,
    "kernels": run_kernels,
    "families": run_families,
    "moe": run_moe,
    "kv": run_kv,
    "quantization": run_quantization,
    "scale": run_scale,
    "ttft": run_ttft,
    "restart": run_restart,
    "turns": run_turns,
    "scrape": run_scrape,
    "neighbours": run_neighbours,
    "speculation": run_speculation,
    "hybrid": run_hybrid,
    "delayed": run_delayed,
    "crowd": run_crowd,
    "stated-asking": run_stated_asking,
    "stated-pair": run_stated_pair,
    "repetitive": run_repetitive,
    "batches": run_batches,
    "deadlines": run_deadlines,
    "embeddings": run_embeddings,
    "gguf": run_gguf,
    "peers": run_peers,
    "served": lambda context: run_load(context, served=True, peer=False),
    "transformers": lambda context: run_load(context, served=False, peer=True),
}
NEED_MORE = ("embeddings", "gguf", "peers")  # an embedding model and its own library; files; engines


def plan(names: Sequence[str]) -> list[Benchmark]:
    """The benchmarks to run, each once; `served` and `transformers` together are one run of both.

    By default all but those that need to be told of something.
    """
    chosen = [name for name in BENCHMARKS if name in names or not (names or name in NEED_MORE)]
    if "served" in chosen and "transformers" in chosen:
        kept = [BENCHMARKS[name] for name in chosen if name not in ("served", "transformers")]
        return [*kept, lambda context: run_load(context, served=True, peer=True)]
    return [BENCHMARKS[name] for name in chosen]


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure Slipstream's speed.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(BENCHMARKS)}; default: all but {', '.join(NEED_MORE)}",
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median is shown (default 3)")
    parser.add_argument("--json", type=Path, help="where to write the report (default .bench/TIME.json)")
    parser.add_argument(
        "--peer", type=Peer.parse, action="append", default=[], help=PEER_HELP, metavar="NAME=HOW"
    )
    parser.add_argument(
        "--gguf", type=Path, action="append", default=[], help="a file for gguf; repeatable", metavar="FILE"
    )
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server for gguf", metavar="FILE")
    parser.add_argument("--model", default="", help="what to serve in place of the default model")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    if ("peers" in arguments.names) != bool(arguments.peer):
        parser.error("peers and --peer go together")
    if len({"gguf" in arguments.names, bool(arguments.gguf), arguments.llama_server is not None}) != 1:
        parser.error("gguf, --gguf and --llama-server go together")
    return arguments


def run(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit code is 1 when something could not be measured.

    A bar that is not met is a finding and not a fault: it does not change the code.
    """
    arguments = read_arguments(argv)
    end_in_order()
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    flags = ("--model", arguments.model) if arguments.model else ()
    context = BenchContext(
        settings=load_settings(list(flags)),
        flags=flags,
        runs=arguments.runs,
        peers=tuple(arguments.peer),
        gguf_files=tuple(arguments.gguf),
        llama_server=arguments.llama_server,
        say=lambda text: progress.print(Text(f"… {text}", style="dim")),
    )
    facts = about() | {"model": context.settings.model.model, "runs": arguments.runs}
    console.print_json(json.dumps(facts))
    sections: list[Section] = []
    failures: list[str] = []
    for benchmark in plan(arguments.names):
        try:
            sections += measured(benchmark, context, console)
        except BenchmarkFailed as failure:
            failures.append(str(failure))
            console.print(Text(f"NOT MEASURED: {failure}\n", "bold red"), soft_wrap=True)
    bars = [bar for section in sections for bar in section.bars]
    if bars:
        console.print(Text("All bars", style="bold"))
        console.print(bars_table(bars))
    path = arguments.json or REPOSITORY / ".bench" / time.strftime("%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(report_json(facts | {"failures": failures}, sections), indent=1) + "\n", encoding="utf-8"
    )
    console.print(f"written to {path}", soft_wrap=True)
    return 1 if failures else 0


def measured(benchmark: Benchmark, context: BenchContext, console: Console) -> list[Section]:
    """Run one benchmark and show what it found."""
    with CpuWatch() as watch:
        found = benchmark(context)
    for section in found:
        section.other_cpu_percent = watch.other_percent
        section.show(console)
    return found
