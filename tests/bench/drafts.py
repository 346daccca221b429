"""`python -m tests.bench.drafts`: what the model-free drafters propose for known outputs, and what it costs.

No model runs. Each output is taken as what the target would draw: a step accepts the drafts that agree with
it and commits one token more. The tokenizer is the default model's, or `--model`'s.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import tokenizers
from rich.console import Console
from rich.table import Table

from config.loader import load_settings
from engine.compute.drafters.model_free import ModelFreeDrafter
from engine.compute.drafters.ngram import NgramDrafter
from engine.compute.drafters.prediction import PredictionDrafter
from engine.compute.drafters.suffix import SuffixDrafter
from engine.compute.loading.model_source import resolve_model
from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import Drafter, DraftJob, DraftRequest
from tests.bench.draft_texts import all_cases

DRAFTERS = (NgramDrafter, SuffixDrafter, PredictionDrafter, ModelFreeDrafter)
NUM_WANTED = 32
TOKEN_COST = (
    0.1  # of a step at batch 1, for each draft that is verified: about what a small model on a CPU has
)


@dataclass(frozen=True, slots=True)
class Generation:
    """One case, tokenized."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    prediction: tuple[int, ...] = ()


@dataclass(slots=True)
class Score:
    """How the drafts for one output did."""

    num_tokens: int = 0
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    calls_s: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step, if each draft costs TOKEN_COST of one."""
        return self.num_tokens / (self.num_steps + TOKEN_COST * self.num_proposed)


def score(drafter: Drafter, generation: Generation, num_wanted: int) -> Score:
    """Draft before each step, as the engine does; the prompt is told before, while it would be computed."""
    request = DraftRequest(
        "r",
        len(generation.prompt),
        SamplingParams(max_tokens=len(generation.output)),
        prediction=generation.prediction,
    )
    result, output = Score(num_tokens=len(generation.output)), generation.output
    news, first, num_known = generation.prompt, 0, len(generation.prompt)
    while True:
        job = DraftJob(request, 0, first, news, num_known, 0)
        if not drafter.draft([job]).drafts[0].is_behind:
            break
        news, first = (), num_known
    done, first, news = 0, num_known, ()
    while done < len(output):
        wanted = min(num_wanted, len(output) - done - 1)
        answer = drafter.draft([DraftJob(request, 0, first, news, len(generation.prompt) + done, wanted)])
        drafted = answer.drafts[0].token_ids
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == output[done + accepted]:
            accepted += 1
        result.num_steps += 1
        result.num_proposed += len(drafted)
        result.num_accepted += accepted
        result.calls_s.append(answer.draft_s)
        first = len(generation.prompt) + done + accepted  # what follows is news, or was drafted otherwise
        news = output[done + accepted : done + accepted + 1]
        done += accepted + 1
    drafter.close(["r"])
    return result


def quality_table(generations: Sequence[Generation], num_wanted: int) -> Table:
    """One row for each case and drafter that had something to say."""
    table = Table(title=f"drafts of up to {num_wanted} tokens, against known outputs")
    for column in (
        "output",
        "tokens",
        "drafter",
        "proposed",
        "accepted",
        "tokens a step",
        "speed",
        "µs a step",
    ):
        table.add_column(column, justify="left" if column in ("output", "drafter") else "right")
    for generation in generations:
        for kind in DRAFTERS:
            if kind is PredictionDrafter and not generation.prediction:
                continue
            result = score(kind(), generation, num_wanted)
            share = result.num_accepted / result.num_proposed if result.num_proposed else 0.0
            table.add_row(
                generation.name,
                str(result.num_tokens),
                kind.method,
                str(result.num_proposed),
                f"{share:.0%}",
                f"{result.num_tokens / result.num_steps:.2f}",
                f"{result.speed:.2f}x",
                f"{median(result.calls_s) * 1e6:.0f}",
            )
        table.add_section()
    return table


def cost_table(repeats: int) -> Table:
    """Microseconds for one sequence and token, 32 sequences a call: text that never repeats, and a copy."""
    table = Table(title="cost of a call for each of 32 sequences, one new token each")
    for column in ("drafter", "context", "no match µs", "match µs", "reading a prompt, µs a token"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for kind in (NgramDrafter, SuffixDrafter, ModelFreeDrafter):
        for context in (256, 8192):
            read_us, plain_us = timed(kind(), ordinary_tokens(context, repeats), context)
            _, match_us = timed(kind(), repeated_tokens(context, repeats), context)
            cells = (f"{plain_us:.1f}", f"{match_us:.1f}", f"{read_us:.2f}")
            table.add_row(kind.method, str(context), *cells)
    return table


def ordinary_tokens(context: int, repeats: int) -> list[int]:
    """Words drawn with Zipf's frequencies: pairs recur as in prose, longer matches hardly ever."""
    draw = random.Random(3)
    weights = [1.0 / (rank + 3) for rank in range(20_000)]
    return draw.choices(range(20_000), weights, k=context + repeats)


def repeated_tokens(context: int, repeats: int) -> list[int]:
    """A text, then the same again."""
    text = ordinary_tokens(context, 0)
    return (text + text[: repeats + 1])[-(context + repeats) :]


def timed(drafter: Drafter, tokens: Sequence[int], context: int) -> tuple[float, float]:
    """Microseconds a token to read the first `context` tokens; a sequence and call, for those that follow."""
    requests = [DraftRequest(f"r{n}", context, SamplingParams(max_tokens=1)) for n in range(32)]
    start = perf_counter()
    for request in requests:
        told: tuple[int, ...] = tuple(tokens[:context])
        while (
            drafter.draft([DraftJob(request, 0, context - len(told), told, context, 0)]).drafts[0].is_behind
        ):
            told = ()
    read_s = perf_counter() - start
    calls_s = []
    for known in range(context, len(tokens)):
        jobs = [DraftJob(r, 0, known, (tokens[known],), known + 1, NUM_WANTED) for r in requests]
        calls_s.append(drafter.draft(jobs).draft_s)
    return read_s / (len(requests) * context) * 1e6, median(calls_s) / len(requests) * 1e6


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.drafts", description=__doc__)
    parser.add_argument("--model", default=None, help="whose tokenizer; a path or a name, as for serve")
    parser.add_argument("--num-wanted", type=int, default=NUM_WANTED)
    parser.add_argument(
        "--repeats", type=int, default=64, help="tokens timed for each sequence; 0 times nothing"
    )
    arguments = parser.parse_args()
    flags = [] if arguments.model is None else ["--model", arguments.model]
    settings = load_settings(flags, dict(os.environ))
    directory = resolve_model(settings.model, settings.home)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    generations = [
        Generation(case.name, encode(case.prompt), encode(case.output), encode(case.prediction))
        for case in all_cases()
    ]
    console = Console(width=120)
    console.print(quality_table(generations, arguments.num_wanted))
    if arguments.repeats:
        console.print(cost_table(arguments.repeats))


if __name__ == "__main__":
    main()
