"""Which codes a device multiplies with as they are, and whether a model's projections do."""

from __future__ import annotations

import logging
from collections import Counter
from importlib.util import find_spec

import torch
from torch import nn

from config import ModelSettings
from engine.compute.loading.coded_weights import CodedLinear, CodeKind

log = logging.getLogger("slipstream.model")

_LEAST_CAPABILITY = (8, 0)
_FP8_CAPABILITY = (8, 9)  # from here on devices have numbers of 8 bits
NO_KINDS: frozenset[CodeKind] = frozenset()


def kept_kinds(device: torch.device, settings: ModelSettings) -> frozenset[CodeKind]:
    """The kinds of codes that kernels multiply with on `device`.

    None on a CPU, where the settings forbid kernels, and where Triton is missing.
    """
    if device.type != "cuda" or settings.compile == "off" or find_spec("triton") is None:
        return NO_KINDS
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return NO_KINDS
    every = frozenset(CodeKind)
    return every if capability >= _FP8_CAPABILITY else every - {CodeKind.FP8}


def multiply_codes(model: nn.Module, dtype: torch.dtype) -> None:
    """Have kernels multiply with all codes in `model`, each once its answer is seen to be right.

    What does not answer alike, or cannot be compiled, gets weights of `dtype`; the log says so.
    """
    coded = {name: module for name, module in model.named_modules() if isinstance(module, CodedLinear)}
    if not coded:
        return
    from engine.compute.cuda.coded_linear import equal_linear  # needs Triton

    count: Counter[str] = Counter()
    for name, module in coded.items():
        try:
            made: nn.Module | None = equal_linear(module, dtype)
            reason = "they answer otherwise"
        except Exception as error:  # whatever a compiler or a driver may raise
            made, reason = None, (str(error).strip().splitlines() or [type(error).__name__])[0]
        if made is None:
            log.warning("kernels do not multiply with the codes of %s: %s", name, reason)
            made = module.plain(dtype)
        else:
            count[module.coded.kind.value] += 1
        model.set_submodule(name, made)
    kinds = " and ".join(count) or "codes"
    log.info("%d of %d projections are multiplied with as %s", count.total(), len(coded), kinds)
