"""`slipstream serve` with a device whose steps last a stated time and compute nothing.

`python -m tests.bench.stated_server STATED FLAGS...`, where STATED is a record of `StatedModels` in JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from unittest.mock import patch

import numpy as np

from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.drafters.draft_loader import draft_graphs
from engine.compute.drafters.draft_model import DraftSizes, OnDevice
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import Int64
from engine.startup import build_runner
from engine.startup.build_runner import RunnerSizes
from server.commands.cli import main
from tests.bench.stated_device import StatedDevice, StatedRunner, StepTimes


@dataclass(frozen=True, slots=True)
class StatedModels:
    """What the steps of a target last, and of a draft model; three numbers each, of StepTimes.

    `walks` names a file with the token that follows each in either: `target` and `draft`. The draft model has
    a device of its own if it `is_apart`.
    """

    target: Sequence[float]
    draft: Sequence[float] = ()
    walks: str | None = None
    is_apart: bool = False

    def to_json(self) -> str:
        """The argument of the command."""
        return json.dumps(asdict(self))

    def walk(self, name: str) -> Int64 | None:
        """The successors in one of the two; None without walks."""
        if self.walks is None:
            return None
        with np.load(self.walks) as walks:
            successors: Int64 = walks[name]
            return successors


def serve(stated: str, *flags: str) -> int:
    """The command."""
    models = StatedModels(**json.loads(stated))
    device = StatedDevice()
    beside = StatedDevice() if models.is_apart else device

    def make_runner(
        loaded: LoadedModel, sampler: Sampler, sizes: RunnerSizes, for_drafts: ForDrafts
    ) -> StatedRunner:
        plain = build_runner.make_runner(loaded, sampler, sizes, for_drafts)
        assert not isinstance(plain, CudaRunner)
        max_blocks = -(-loaded.max_model_len // sizes.block_size)
        limits = GraphLimits(sizes.max_num_seqs, max_blocks, sizes.max_draft_tokens)
        times = StepTimes(*models.target)
        return StatedRunner(plain, sizes.max_num_tokens, limits, times, device, models.walk("target"))

    def on_device(loaded: LoadedModel, sizes: DraftSizes) -> OnDevice:
        sampler = Sampler(loaded.vocab_size, loaded.device)
        plain = ModelRunner(loaded, sizes.num_blocks, sizes.block_size, sampler)
        limits, times = draft_graphs(loaded, sizes), StepTimes(*models.draft)
        walk, shares = models.walk("draft"), not models.is_apart
        runner = StatedRunner(plain, sizes.max_num_seqs, limits, times, beside, walk, shares_device=shares)
        runner.warm_up()
        return OnDevice(runner, None)

    with (
        patch("engine.startup.build.make_runner", make_runner),
        patch("engine.compute.drafters.draft_loader.on_device", on_device),
    ):
        return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
