"""Rotary embeddings whose frequencies never change while they are served: computed without asking for them.

Dynamic rope (NTK-aware scaling, bloc97 2023) and LongRoPE (Ding et al. 2024) choose their frequencies by the
longest position of a batch, and transformers asks for that in every pass: on a device the host would wait for
the answer, and no graph could be recorded. Below the lengths at which they switch there is nothing to choose.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn

from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.support import exact_context_limit

_CHOOSING = frozenset({"dynamic", "longrope"})


def keep_rotation(loaded: LoadedModel) -> None:
    """Have the rotary embeddings of `loaded` use the frequencies they have, where no length changes them.

    Those are the ones for short texts, as after loading. What is served stays below the switch, or else the
    modules are left as they are; calling it again changes nothing.
    """
    limits = [getattr(loaded.config, "max_position_embeddings", None), exact_context_limit(loaded.config)]
    if loaded.max_model_len > min((limit for limit in limits if limit is not None), default=0):
        return
    for module in loaded.model.modules():
        if _chooses(module):
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)


def _chooses(module: nn.Module) -> bool:
    """True for a rotary embedding of such a type that computes as its class says."""
    types: Any = getattr(module, "rope_type", None)
    kinds = set(types.values()) if isinstance(types, dict) else {types}
    return not kinds.isdisjoint(_CHOOSING) and "forward" not in vars(module)
