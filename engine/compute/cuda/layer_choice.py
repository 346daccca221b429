"""Whether layers and experts are fused: on CUDA, where Triton is there and the settings do not forbid it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from config import ModelSettings
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
