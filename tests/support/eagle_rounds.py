"""Rounds of an EAGLE layer as random as can be, and what two ways to compute them must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from config import load_settings
from engine.compute.cuda.graphs.recorder import Recorder
from engine.compute.cuda.graphs.step_graphs import TabledAttention
from engine.compute.cuda.round_choice import find_steps
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_layer import load_eagle_layer
from engine.compute.drafters.eagle_loader import EagleRoom, make_kv
from engine.compute.drafters.eagle_round import GUESSES, Chain, EagleNoise, EagleRound, Guess
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.layer_chains import ChainSteps, DraftLayer, EagerSteps, LayerChains
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.drafters.mtp_layouts import find_mtp
from engine.compute.drafters.mtp_module import load_mtp_module
from engine.compute.drafters.slab_rows import RowsApart
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.runner.dummy_steps import plain_sampling
from engine.compute.sampling.noise import row_keys
from tests.support.native import WITHOUT_KERNELS
from tests.support.packed import load_tiny
from tests.support.recorded import Playback, TabledReference
from tests.support.tiny_eagle import TinyEagle
from tests.support.tiny_mtp import TinyMtp

WINDOW = 12
ROOM = EagleRoom(max_num_seqs=8, kv_bytes=1 << 26)


class Case:
    """A layer that reads features of `width` numbers, a module those of a `target`."""

    def __init__(
        self, layer: DraftLayer, width: int, like: EagleKv, target: LoadedModel | None = None
    ) -> None:
        self.layer = layer
        self.width = width
        self.target = target
        self._like = like

    def kv(self, num_slabs: int = 8) -> EagleKv:
        """Slabs of their own."""
        like = self._like
        return EagleKv(like.tensors.layers[0], WINDOW, num_slabs, like.most_drafts, like.keys)

    def eager(self, kv: EagleKv) -> EagerSteps:
        """By operations of torch, each sequence by itself."""
        return EagerSteps(self.layer, partial(RowsApart, kv), GUESSES)

    def recorded(
        self,
        kv: EagleKv,
        recorder: Recorder | None = None,
        backend: TabledAttention | None = None,
        layers: Sequence[DraftLayer] = (),
    ) -> ChainSteps:
        """As a GPU would compute them that has this recorder and backend."""
        backend = backend or TabledReference()
        return find_steps(self.eager(kv), kv, self.width, backend, recorder or Playback(), layers)


def made_round(
    rows: list[int],
    drafts: list[int],
    kept: list[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    width: int = 3 * 64,
) -> EagleRound:
    """Sequences with so many new rows each, in any of 8 slabs or more; features are as random as tokens."""
    rng = np.random.default_rng(seed)
    draw = torch.Generator().manual_seed(seed)
    count = len(rows)
    positions = np.concatenate(
        [np.arange(first, first + some) + 7 for first, some in zip(kept, rows, strict=True)]
    )
    sampling = plain_sampling(np.arange(count) + 50, temperature)
    sampling.seed[:] = rng.integers(0, 2**60, count)
    sampling.top_p[::2] = 0.9
    sampling.min_p[::3] = 0.02
    most = max(drafts)
    places = (sampling.position[:, None] + np.arange(most)).reshape(-1)
    keys = row_keys(np.repeat(sampling.seed, most), places).view(count, most, 2)
    return EagleRound(
        features=torch.randn((sum(rows), width), generator=draw),
        token_ids=rng.integers(3, 500, sum(rows)).tolist(),
        positions=positions.tolist(),
        num_rows=rows,
        num_kept=kept,
        slabs=rng.permutation(max(8, count))[:count].tolist(),
        num_drafts=drafts,
        num_wanted=drafts,
        noise=EagleNoise(sampling, keys) if temperature else None,
    )


def assert_alike(found: list[Chain], expected: list[Chain], *, drawn: bool) -> None:
    """But for rounding.

    Where noise draws, the kernel lists only what could win, so fewer others stand beside a chain and it may
    be longer.
    """
    if drawn:
        expected = [chain[: len(own)] for chain, own in zip(expected, found, strict=True)]
        found = [own[: len(chain)] for chain, own in zip(expected, found, strict=True)]
    assert [len(chain) for chain in found] == [len(chain) for chain in expected]
    for own, other in zip(chain_of(found), chain_of(expected), strict=True):
        for guess, like in zip(own, other, strict=not drawn):
            assert guess.token_id == like.token_id
            assert guess.chance == pytest.approx(like.chance, rel=1e-3, abs=1e-6)


def chain_of(chains: list[Chain]) -> list[list[Guess]]:
    """The guesses of all chains, position by position."""
    return [guesses for chain in chains for guesses in chain]


def eagle_case(directory: Path) -> Case:
    """A tiny EAGLE layer, saved there."""
    target = load_tiny("llama")
    tiny = TinyEagle(target, token_ids=torch.arange(3, 303, 3))
    weights = EagleWeights.of(load_eagle_layer(tiny.save(directory), target))
    return Case(TorchEagle(weights), 3 * 64, make_kv(weights.sizes.kv, WINDOW, weights.head, ROOM))


def mtp_case(family: str, directory: Path, *flags: str) -> Case:
    """The module of a tiny target, saved there."""
    TinyMtp(family).save(directory)
    settings = load_settings([str(directory), "--dtype", "float32", *flags], environ=WITHOUT_KERNELS)
    target = load_model(directory, settings.model)
    layout = find_mtp(directory, target.config)
    assert layout is not None
    module = load_mtp_module(directory, target, layout)
    return Case(MtpLayer(module), 64, make_kv(module.layer, WINDOW, module.weight, ROOM), target)


def assert_same_rounds(
    case: Case, found: ChainSteps, temperature: float = 0.0, turns: int | None = None
) -> None:
    """Those of one by one, while sequences come and end, past the window and the end of slabs."""
    kv = case.kv()
    plain, chains = LayerChains(case.eager(kv), 0.0), LayerChains(found, 0.0)
    kept = [0] * 5
    for turn, (rows, drafts) in enumerate(
        [
            ([4, 1, 2], [5, 3, 2]),
            ([1], [4]),
            ([2, 3, 1, 1, 5], [6, 6, 2, 1, 0]),
            ([9, 1], [2, 2]),
            ([1, 1, 1, 1], [1, 1, 1, 1]),
            ([2, 2, 3], [6, 1, 1]),
        ][:turns]
    ):
        before = kept[: len(rows)]
        work = made_round(rows, drafts, before, temperature=temperature, seed=turn, width=case.width)
        work = replace(work, slabs=[3, 0, 7, 1, 2][: len(rows)])
        assert_alike(chains.run(work), plain.run(work), drawn=False)
        kept[: len(rows)] = [first + some for first, some in zip(before, rows, strict=True)]
