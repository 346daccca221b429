"""load_mtp_drafter: from a model's own files to a drafter around its MTP module."""

from __future__ import annotations

from pathlib import Path

from engine.compute.drafters.eagle import EagleDrafter
from engine.compute.drafters.eagle_loader import EagleRoom, Slabs, chains_for, make_kv
from engine.compute.drafters.eagle_weights import DEFAULT_WINDOW
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.drafters.mtp_layouts import MtpLayout
from engine.compute.drafters.mtp_module import load_mtp_module
from engine.compute.loading.loader import LoadedModel
from engine.plan.speculation.speculation_config import Verification


def load_mtp_drafter(
    directory: Path,
    target: LoadedModel,
    layout: MtpLayout,
    room: EagleRoom,
    verification: Verification = "match",
) -> EagleDrafter:
    """The drafter around the module in the target's `directory`. Raises StartRefused.

    Its K/V has a bound, though the module was trained without one. For a recurrent target it drafts chains.
    """
    module = load_mtp_module(directory, target, layout)
    kv = make_kv(module.layer, _window(target), module.weight, room)
    return EagleDrafter(
        chains_for(target, MtpLayer(module), kv),
        kv,
        module,
        (int(target.config.num_hidden_layers),),  # what leaves the last layer
        couples=verification == "match",
        plants_trees=not target.keeps_state,
    )


def foresee_mtp_kv(target: LoadedModel) -> Slabs:
    """The slabs of the module in the files of a target, which may be an outline.

    The module's layer is one of the target's kind that attends to everything.
    """
    layer = next((layer for layer in target.layers if layer.reach is None), target.layers[0])
    return Slabs(layer, _window(target), target.dtype)


def _window(target: LoadedModel) -> int:
    """How many positions one sees."""
    return min(DEFAULT_WINDOW, target.max_model_len)
