"""Whether layers and experts are fused: on CUDA, where Triton is there and the settings do not forbid it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from config import ModelSettings
from engine.compute.attention import AttentionBackend
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.layer_chains import DraftLayer
from engine.compute.drafters.mtp_module import MtpModule
from engine.compute.loading.loader import LoadedModel


def with_fast_layers(
    loaded: LoadedModel, settings: ModelSettings, block_size: int, reload: Callable[[], LoadedModel]
) -> LoadedModel:
    """The model, on CUDA with layers and experts fused where no answer changes; see `with_fused_layers`."""
    if loaded.device.type != "cuda" or settings.compile == "off":
        return loaded
    if find_spec("triton") is None:
        return loaded
    from engine.compute.cuda.fused_model import with_fused_layers

    return with_fused_layers(loaded, block_size, reload)


def quick_layer(
    weights: EagleWeights | MtpModule, target: LoadedModel, settings: ModelSettings, block_size: int
) -> Callable[[AttentionBackend], DraftLayer | None] | None:
    """What fuses a drafter's layer, once it is known that attention is Triton's; None: nothing does."""
    if target.device.type != "cuda" or settings.compile == "off":
        return None

    def make(backend: AttentionBackend) -> DraftLayer | None:
        from engine.compute.cuda.fused_eagle import FusedEagle  # which need Triton
        from engine.compute.cuda.fused_module import fused_layer

        if isinstance(weights, MtpModule):
            return fused_layer(weights, target, block_size, backend)
        return FusedEagle(weights)

    return make
