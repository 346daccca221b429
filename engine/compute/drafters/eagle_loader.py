"""load_eagle_drafter: from a directory to a drafter on the target's device, or the one that comes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.compute.drafters.eagle import LEAST_CHANCE, EagleDrafter
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_layer import is_for, load_eagle_layer
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleSizes, EagleWeights
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


def shipped_heads(target: LoadedModel) -> Path | None:
    """The directory of the drafter that was trained for exactly this model and comes with the project."""
    found = sorted(path for path in SHIPPED.glob("*") if path.is_dir())
    return next((path for path in found if is_for(path, target)), None)


def load_eagle_drafter(
    directory: Path, target: LoadedModel, room: EagleRoom, verification: Verification = "match"
) -> EagleDrafter:
    """The drafter around the layer in `directory`, in tensor operations. Raises StartRefused."""
    layer = load_eagle_layer(directory, target)
    weights = EagleWeights.of(layer)
    sizes = weights.sizes
    kv = EagleKv(
        (sizes.kv_heads, sizes.head_dim),
        sizes.window,
        count_slabs(sizes, target.dtype, room),
        MOST_DRAFTS,
        weights.head,
    )
    compute = TorchEagle(weights, kv, LEAST_CHANCE)
    return EagleDrafter(compute, kv, weights, layer.shape.feature_layers, couples=verification == "match")


def count_slabs(sizes: EagleSizes, dtype: torch.dtype, room: EagleRoom) -> int:
    """For how many sequences there is room."""
    slots = 2 * sizes.window + MOST_DRAFTS
    each = 2 * slots * sizes.kv_heads * sizes.head_dim * dtype.itemsize
    return max(1, min(room.max_num_seqs, room.kv_bytes // each))
