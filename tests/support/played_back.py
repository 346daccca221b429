"""What runs on a GPU, run on a CPU that plays recordings back: whole engines, and draft models in chains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.compute.cuda import round_choice
from engine.compute.cuda.cuda_runner import CudaRunner
from engine.compute.cuda.graphs.step_graphs import GraphLimits
from engine.compute.drafters.draft_loader import draft_graphs
from engine.compute.drafters.draft_model import DraftSizes, OnDevice
from engine.compute.loading.loader import LoadedModel
from engine.compute.recurrent.recurrent_runner import RecurrentRunner
from engine.compute.runner.model_runner import ForDrafts, ModelRunner
from engine.compute.sampling.sampler import Sampler
from engine.startup import build_runner
from engine.startup.build_runner import RunnerSizes
from tests.support.recorded import Playback, TabledReference
from tests.support.tabled_scans import TabledScans


def played_back(plain: ModelRunner | RecurrentRunner, max_rows: int, limits: GraphLimits) -> CudaRunner:
    """The runner of a GPU around the parts of `plain`, not warmed up."""
    plain.forward.backend = TabledReference()
    return CudaRunner(plain, max_rows, limits, Playback())


def make_runner(
    loaded: LoadedModel, sampler: Sampler, sizes: RunnerSizes, for_drafts: ForDrafts
) -> CudaRunner:
    """Stands in for engine.startup.build_runner's; of models that carry state it records any."""
    loaded = replace(loaded, state_kernel=TabledScans()) if loaded.keeps_state else loaded
    plain = build_runner.make_runner(loaded, sampler, sizes, for_drafts)
    assert not isinstance(plain, CudaRunner)
    max_blocks = -(-loaded.max_model_len // sizes.block_size)
    limits = GraphLimits(sizes.max_num_seqs, max_blocks, sizes.max_draft_tokens)
    return played_back(plain, sizes.max_num_tokens, limits)


def on_device(loaded: LoadedModel, sizes: DraftSizes) -> OnDevice:
    """Stands in for draft_loader's."""
    sampler = Sampler(loaded.vocab_size, loaded.device)
    plain = ModelRunner(loaded, sizes.num_blocks, sizes.block_size, sampler)
    runner = played_back(plain, sizes.max_num_seqs, draft_graphs(loaded, sizes))
    runner.graphs.record(Playback())
    return OnDevice(runner, None)


def play_back_rounds(monkeypatch: pytest.MonkeyPatch) -> Playback:
    """Have every drafter of one layer compute its rounds as on a GPU; what they are recorded by."""
    recorder = Playback()
    monkeypatch.setattr(round_choice, "choose_backend", lambda *_, **__: TabledReference())
    monkeypatch.setattr(round_choice, "CudaRecorder", lambda _: recorder)
    return recorder


def play_back_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every engine that is put together run its target as on a GPU."""
    monkeypatch.setattr("engine.startup.build.make_runner", make_runner)
