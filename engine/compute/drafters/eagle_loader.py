"""load_eagle_drafter: from a directory to a drafter on the target's device, or the one that comes with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.compute.attention.kv_tensors import bytes_per_block
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.eagle import LEAST_CHANCE, EagleDrafter
from engine.compute.drafters.eagle_kv import EagleKv, slots_for
from engine.compute.drafters.eagle_layer import is_for, load_eagle_layer, read_eagle_config
from engine.compute.drafters.eagle_round import GUESSES
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleSizes, EagleWeights
from engine.compute.drafters.layer_chains import DraftLayer, EagerSteps, LayerChains
from engine.compute.drafters.slab_rows import RowsApart
from engine.compute.loading.loader import LoadedModel
from engine.plan.speculation.speculation_config import Verification

# Drafters that come with the project, a directory each; which model one is for is told by its fingerprint.
SHIPPED = Path(__file__).parent / "heads"
# The longest chain: a draft behind so many others is hardly ever reached.
MOST_DRAFTS = 16


@dataclass(frozen=True, slots=True)
class EagleRoom:
    """How many sequences, and how many bytes of K/V for them, of which one at least is taken."""

    max_num_seqs: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Slabs:
    """The K/V that `make_kv` makes, of which `layer` says what is kept of a position."""

    layer: LayerKv
    window: int
    dtype: torch.dtype

    def count(self, room: EagleRoom) -> int:
        """How many sequences have one: one at least."""
        return max(1, min(room.max_num_seqs, room.kv_bytes // self._bytes_of_one))

    def num_bytes(self, room: EagleRoom) -> int:
        """What all of them take."""
        return self.count(room) * self._bytes_of_one

    @property
    def _bytes_of_one(self) -> int:
        return bytes_per_block((self.layer,), slots_for(self.window, MOST_DRAFTS), self.dtype)


def shipped_heads(target: LoadedModel) -> Path | None:
    """The directory of the drafter that was trained for exactly this model and comes with the project."""
    found = sorted(path for path in SHIPPED.glob("*") if path.is_dir())
    return next((path for path in found if is_for(path, target)), None)


def load_eagle_drafter(
    directory: Path, target: LoadedModel, room: EagleRoom, verification: Verification = "match"
) -> EagleDrafter:
    """The drafter around the layer in `directory`, in tensor operations. Raises StartRefused.

    For a recurrent target it drafts chains.
    """
    layer = load_eagle_layer(directory, target)
    weights = EagleWeights.of(layer)
    sizes = weights.sizes
    kv = make_kv(sizes.kv, sizes.window, weights.head, room)
    return EagleDrafter(
        chains_for(target, TorchEagle(weights), kv),
        kv,
        weights,
        layer.shape.feature_layers,
        couples=verification == "match",
        plants_trees=not target.keeps_state,
    )


def chains_for(target: LoadedModel, layer: DraftLayer, kv: EagleKv) -> LayerChains:
    """How drafts are drawn from `layer`: several guesses for each place, where the target verifies trees."""
    num_guesses = 1 if target.keeps_state else GUESSES
    return LayerChains(EagerSteps(layer, partial(RowsApart, kv), num_guesses), LEAST_CHANCE)


def make_kv(layer: LayerKv, window: int, like: torch.Tensor, room: EagleRoom) -> EagleKv:
    """Slabs for as many sequences as there is room for, of the dtype and on the device of `like`."""
    num_slabs = Slabs(layer, window, like.dtype).count(room)
    return EagleKv(layer, window, num_slabs, MOST_DRAFTS, like)


def foresee_eagle_kv(directory: Path, target: LoadedModel) -> Slabs:
    """The slabs of the drafter in `directory`, of which no weights are read. Raises StartRefused."""
    sizes = EagleSizes.of(*read_eagle_config(directory, target))
    return Slabs(sizes.kv, sizes.window, target.dtype)
