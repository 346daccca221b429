"""A target whose passes last a stated time without the CPU, as a GPU's do, and a draft model on the CPU.

Over HTTP, by schedule, against the formulas. The pair is made up: the target is two random layers, so that it
takes hardly any of the CPU; the draft model is the same two with noise in their weights, which sets how often
it is right, and 28 layers that add nothing, which it computes all the same. What a pass lacks is slept, as
the fault plan has it.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from config.environment import FAULT_PLAN, FAULT_SWITCH
from engine.compute.drafters.draft_loader import AUTO_LANES
from engine.plan.speculation.recent_gain import expected_tokens, theoretical_speedup
from tests.bench.context import BenchContext
from tests.bench.load import HTTP_TIMEOUT_S
from tests.bench.processes import JsonWorker, Server
from tests.bench.report import Bar, Section
from tests.bench.sim_spec.cell import free_speedup
from tests.bench.streams import BenchmarkFailed, StreamRecord
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

BATCHES = (1, 4, 16)
BARRED = (1, 16)
NUM_DRAFTS = 4
COST_RATIO = 0.19  # of a draft to a pass, which the delay is chosen for: five of them fit in
NOISE = 0.025  # in the draft model's weights, over their own spread
MAX_TOKENS = 160
WARM_TOKENS = 24
OVER_SYNC = 1.15
OFF_THE_FORMULA = 0.07
SCHEDULES = ("off", "sync", "async", "lanes")  # lanes: async, and drafts for other outcomes, too
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_ID,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
TARGET_LAYERS, DRAFT_LAYERS = 2, 30


def save_pair(directory: Path, noise: float = NOISE) -> tuple[Path, Path]:
    """The target and its draft model, each with the tokenizer."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=TARGET_LAYERS)).bfloat16()
    draft = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=DRAFT_LAYERS)).bfloat16()
    theirs = dict(target.named_parameters())
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            source = theirs.get(name)
            if source is not None:
                spread = source.float().std() if source.ndim == 2 else 0.0
                weight.copy_(source + noise * spread * torch.randn(source.shape))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    paths = directory / "target", directory / "draft"
    for model, path in zip((target, draft), paths, strict=True):
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    return paths


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server has counted since it started."""

    rounds: float
    accepted: float
    drafted_s: float

    @classmethod
    def of(cls, server: Server) -> Counts:
        """As its metrics have it."""
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as reply:
            text = reply.read().decode()

        def total(name: str) -> float:
            return sum(
                float(value) for value in re.findall(rf"^slipstream_{name}(?:{{.*}})? (\S+)$", text, re.M)
            )

        return cls(
            total("spec_decode_num_drafts_total"),
            total("spec_decode_num_accepted_tokens_total"),
            total("draft_duration_seconds_sum"),
        )

    def since(self, before: Counts) -> Counts:
        """What came to it."""
        return Counts(
            self.rounds - before.rounds,
            self.accepted - before.accepted,
            self.drafted_s - before.drafted_s,
        )


@dataclass(frozen=True, slots=True)
class Burst:
    """Tokens a second of a stream, and what the server counted meanwhile."""

    batch: int
    rate: float
    counts: Counts

    @property
    def alpha(self) -> float:
        """The chance of each draft that makes for as many accepted ones a round, by bisection."""
        wanted = 1 + self.counts.accepted / self.counts.rounds
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if expected_tokens(NUM_DRAFTS, middle) < wanted else (low, middle)
        return low

    @property
    def draft_s(self) -> float:
        """Of a micro-step, which drafts one token of every stream, where nothing is drafted in vain."""
        return self.counts.drafted_s * self.batch / (NUM_DRAFTS * self.counts.rounds)


def burst(server: Server, client: JsonWorker, batch: int, max_tokens: int, seed: int) -> Burst:
    """So many streams at once, sampled, each of so many tokens."""
    bodies = [
        {
            "prompt": f"Stream {number} says",
            "max_tokens": max_tokens,
            "temperature": 1,
            "seed": 1000 * seed + number,
            "ignore_eos": True,
        }
        for number in range(batch)
    ]
    question = {"host": server.host, "port": server.port, "bodies": bodies, "timeout_s": HTTP_TIMEOUT_S}
    before = Counts.of(server)
    answer = client.ask(question, HTTP_TIMEOUT_S + 10)
    records = [StreamRecord.from_json(record) for record in answer["records"]]
    if any(record.num_output_tokens != max_tokens for record in records):
        raise BenchmarkFailed("a stream ended early")
    seconds = [record.event_times[-1] - record.event_times[0] for record in records]
    rate = sum((max_tokens - 1) / each for each in seconds) / batch
    return Burst(batch, rate, Counts.of(server).since(before))


class Sides:
    """A server for each schedule, of which one works at a time."""

    def __init__(self, stack: ExitStack, pair: tuple[Path, Path], delay_s: float, batch: int) -> None:
        target, draft = map(str, pair)
        # The draft model's K/V, which take more than the target's here, get a part of this.
        shape = ("--max-model-len", "256", "--max-num-seqs", str(batch), "--kv-cache-memory", "512MiB")
        fault = {"point": "forward_sleep", "count": -1, "seconds": delay_s}
        env = {**os.environ, FAULT_SWITCH: "1", FAULT_PLAN: json.dumps([fault])}
        fixed = ("--draft-length-policy", "fixed", "--min-acceptance-rate", "0")
        pairing = ("--speculative-method", "draft-model", "--draft-model", draft, *fixed)
        self.servers: dict[str, Server] = {}
        for schedule in SCHEDULES:
            drafts = ["--num-speculative-tokens", str(NUM_DRAFTS), "--speculation-schedule", schedule]
            if schedule == "lanes":
                drafts[-1:] = ["async", "--draft-lanes", str(AUTO_LANES)]
            flags = ("--speculative-method", "none") if schedule == "off" else (*pairing, *drafts)
            server = stack.enter_context(Server("--model", target, *shape, *flags, env=env))
            self.servers[schedule] = server
        self._client = stack.enter_context(JsonWorker("tests.bench.load_client"))
        for server in self.servers.values():
            server.wait_ready()
            self._burst(server, batch, WARM_TOKENS, 0)

    def _burst(self, server: Server, batch: int, max_tokens: int, seed: int) -> Burst:
        return burst(server, self._client, batch, max_tokens, seed)

    def turn(self, batch: int, seed: int) -> dict[str, Burst]:
        """One burst on each, with the same seeds."""
        return {
            schedule: self._burst(server, batch, MAX_TOKENS, seed)
            for schedule, server in self.servers.items()
        }


def draft_seconds(pair: tuple[Path, Path], batch: int) -> float:
    """Of a micro-step of so many sequences beside a target that takes no time."""
    with ExitStack() as stack:
        sides = Sides(stack, pair, 0.0, batch)
        return sides.turn(batch, 1)["sync"].draft_s


def run_batch(context: BenchContext, section: Section, pair: tuple[Path, Path], batch: int) -> None:
    """All schedules at one number of streams: rows of the section, and its bars."""
    delay_s = draft_seconds(pair, batch) / COST_RATIO
    turns: list[dict[str, Burst]] = []
    with ExitStack() as stack:
        sides = Sides(stack, pair, delay_s, batch)
        for run in range(context.runs):
            context.say(f"delayed, batch {batch}, run {run + 1}/{context.runs}")
            turns.append(sides.turn(batch, run + 1))
    name = f"batch {batch}"
    section.add(name, "delay of a pass", "ms", [1e3 * delay_s])
    alphas = [turn["sync"].alpha for turn in turns]
    costs = [turn["sync"].draft_s * turn["off"].rate for turn in turns]
    section.add(name, "α", "", alphas)
    section.add(name, "c", "", costs)
    for schedule in SCHEDULES:
        section.add(name, f"{schedule}, a stream", "tokens/s", [turn[schedule].rate for turn in turns])
    formulas = {
        "sync": [theoretical_speedup(NUM_DRAFTS, a, c) for a, c in zip(alphas, costs, strict=True)],
        "async": [free_speedup(NUM_DRAFTS, alpha) for alpha in alphas],
    }
    for schedule, expected in formulas.items():
        gains = [turn[schedule].rate / turn["off"].rate for turn in turns]
        section.add(name, f"{schedule} over off", "x", gains)
        off = section.add(
            name,
            f"{schedule} over the formula",
            "x",
            [gain / each for gain, each in zip(gains, expected, strict=True)],
        )
        if batch in BARRED and off.median is not None:
            distance = abs(off.median - 1)
            section.bars.append(
                Bar(f"{name}: {schedule} from the formula", OFF_THE_FORMULA, "", distance, at_least=False)
            )
    section.add(name, "lanes over async", "x", [turn["lanes"].rate / turn["async"].rate for turn in turns])
    ratios = [turn["async"].rate / turn["sync"].rate for turn in turns]
    ratio = section.add(name, "async over sync", "x", ratios)
    if batch in BARRED:
        section.bars.append(Bar(f"{name}: async over sync", OVER_SYNC, "x", ratio.median, at_least=True))


def run_delayed(context: BenchContext, batches: Sequence[int] = BATCHES) -> list[Section]:
    """The section `delayed` with its bars."""
    section = Section("delayed", "a target that does not use the CPU, and a draft model that does, over HTTP")
    with TemporaryDirectory(prefix="slipstream-delayed-") as directory:
        pair = save_pair(Path(directory))
        for batch in batches:
            run_batch(context, section, pair, batch)
    return [section]
