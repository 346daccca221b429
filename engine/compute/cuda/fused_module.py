"""An MTP module whose layer is fused as a target's are, wherever that answers alike."""

from __future__ import annotations

import logging

import torch

from engine.compute.attention import AttentionBackend
from engine.compute.cuda.fused_model import fuse_all
from engine.compute.cuda.fused_parts import quick_norm
from engine.compute.drafters.mtp_layer import MtpLayer
from engine.compute.drafters.mtp_module import MtpModule
from engine.compute.loading.loader import LoadedModel

log = logging.getLogger("slipstream.speculation")


@torch.inference_mode()
def fused_layer(
    module: MtpModule, target: LoadedModel, block_size: int, backend: AttentionBackend
) -> MtpLayer | None:
    """The layer of the module with its parts fused, over its own weights; None where none are.

    Only rows that attend together can be computed by it. Raises whatever a compiler or driver does.
    """
    whole = module.as_model(target)
    fused = fuse_all(whole, backend, block_size)
    if not fused:
        return None
    log.info("kernels of the MTP module: %s", ", ".join(fused))
    return MtpLayer(module.with_layer_of(whole.model, quick_norm))
