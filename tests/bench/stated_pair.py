"""A draft model that is right four times of five, on a device of stated times: what drafts bring over HTTP.

What the host adds to a round is real, what the device takes is stated: about an 8B model and a 1B one on an
H200. They share the device, which then does one thing at a time; or each has its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import AutoTokenizer

from engine.plan.step_records import Int64
from tests.bench.context import BenchContext
from tests.bench.crowd import StatedServer, burst, save_model_like
from tests.bench.gpu.made_models import random_walk, strayed
from tests.bench.processes import JsonWorker
from tests.bench.report import Bar, Section
from tests.bench.stated_device import StepTimes
from tests.bench.stated_server import StatedModels
from tests.bench.streams import decode_rate, percentile

BATCHES = (1, 4, 16, 64)
AGREEMENT = 0.8
TARGET = StepTimes(4e-3, 25e-6, 20e-6)
DRAFT = StepTimes(0.6e-3, 6e-6, 2.5e-6)
SCHEDULES = ("off", "sync", "async", "auto")
SYNC_BAR, ASYNC_BAR, NEVER_BAR = 1.5, 1.0, 0.97
_WORDS = 4096  # that the walks go through


def save_walks(tokenizer_from: Path, path: Path) -> None:
    """What follows each token in the target and in the draft model: words of plain letters."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    texts = tokenizer.batch_decode([[token_id] for token_id in range(len(tokenizer))])
    words = [token_id for token_id, text in enumerate(texts) if text.strip().isalpha() and text.isascii()]
    words = words[:_WORDS]
    ids, walk = np.array(words), random_walk(len(words))
    walks = {"target": walk, "draft": strayed(walk, AGREEMENT)}
    np.savez(
        path,
        allow_pickle=False,
        **{name: _among(ids, each.numpy(), len(texts)) for name, each in walks.items()},
    )


def _among(ids: Int64, walk: Int64, vocab_size: int) -> Int64:
    """What follows each token: of `ids` by the walk, of others one of these."""
    following = np.resize(ids, vocab_size)
    following[ids] = ids[walk]
    return following


class Arms:
    """A server for each schedule, of which one works at a time."""

    def __init__(self, stack: ExitStack, directory: Path, *, is_apart: bool) -> None:
        walks = str(directory / "walks.npz")
        stated = StatedModels(TARGET, DRAFT, walks, is_apart)
        self.servers: dict[str, StatedServer] = {}
        for schedule in SCHEDULES:
            flags = ["--speculative-method", "draft-model", "--draft-model", str(directory)]
            flags += ["--speculation-schedule", schedule]
            if schedule == "off":
                flags = ["--speculative-method", "none"]
            self.servers[schedule] = server = StatedServer(stated, directory, max(BATCHES), *flags)
            stack.enter_context(server)
            server.wait_ready()
        self._client = stack.enter_context(JsonWorker("tests.bench.load_client"))

    def turn(self, batch: int) -> dict[str, float]:
        """Tokens a second of the middle stream by schedule, of one burst each."""
        return {schedule: self._rate(server, batch) for schedule, server in self.servers.items()}

    def _rate(self, server: StatedServer, batch: int) -> float:
        return percentile([decode_rate(record) for record in burst(server, self._client, batch)], 50)


def run_stated_pair(context: BenchContext) -> list[Section]:
    """The section `stated-pair` with its bars."""
    section = Section("stated-pair", "drafts that are right four times of five, on a device of stated times")
    with TemporaryDirectory(prefix="slipstream-pair-") as name:
        directory = Path(name)
        save_model_like(context.model_directory, directory)
        save_walks(directory, directory / "walks.npz")
        for is_apart in (False, True):
            _measure(context, section, directory, is_apart=is_apart)
    return [section]


def _measure(context: BenchContext, section: Section, directory: Path, *, is_apart: bool) -> None:
    place = "two devices" if is_apart else "one device"
    with ExitStack() as stack:
        arms = Arms(stack, directory, is_apart=is_apart)
        for batch in BATCHES:
            context.say(f"stated-pair, {place}, batch {batch}")
            arms.turn(batch)  # in which they find out what pays
            turns = [arms.turn(batch) for _ in range(context.runs)]
            name = f"{place}, batch {batch}"
            for schedule in SCHEDULES:
                section.add(name, schedule, "tokens/s", [turn[schedule] for turn in turns])
            gains = {}
            for schedule in SCHEDULES[1:]:
                ratios = [turn[schedule] / turn["off"] for turn in turns]
                gains[schedule] = section.add(name, f"{schedule} / off", "x", ratios).median
            ahead = section.add(name, "async / sync", "x", [turn["async"] / turn["sync"] for turn in turns])
            if batch == 1:
                section.bars.append(Bar(f"{name}: sync / off", SYNC_BAR, "x", gains["sync"], at_least=True))
                section.bars.append(Bar(f"{name}: async / sync", ASYNC_BAR, "x", ahead.median, at_least=True))
            section.bars.append(Bar(f"{name}: auto / off", NEVER_BAR, "x", gains["auto"], at_least=True))
