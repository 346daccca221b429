"""Puts our modules into a loaded model wherever they give what the model's own give."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from config import ModelSettings
from engine.errors import StartRefused
from engine.model.loader import LoadedModel
from engine.model.native.compiler import NativeUnavailable, library
from engine.model.native.kernels import NativeKernels
from engine.model.native.modules import NativeAttention, NativeGatedMlp, NativeLinear, NativeRmsNorm
from engine.model.packed_forward import PackedForward
from engine.model.self_check import packed_difference, packed_sample

log = logging.getLogger("slipstream.model")

# Of outputs' spread: bfloat16 rounds at 0.004, and sums are taken in another order.
_MODULE_TOLERANCE = 0.02
_CHECK_ROWS = 3


def with_kernels(loaded: LoadedModel, settings: ModelSettings, home: Path) -> LoadedModel:
    """The model with our modules in it, as `--compile` asks; the log says what became of it.

    `loaded` itself is changed: use what is returned. Raises StartRefused if `on` cannot be had.
    """
    if settings.compile == "off":
        return loaded
    try:
        return install(loaded, _kernels_for(loaded, home))
    except NativeUnavailable as reason:
        if settings.compile == "on":
            raise StartRefused(f"--compile on: {reason}. Leave it out to do without.") from reason
        log.info("compiled kernels are not used: %s", reason)
        return loaded


def install(loaded: LoadedModel, kernels: NativeKernels) -> LoadedModel:
    """Replace module after module, freeing the weights of each, then compare the logits with those before.

    Raises NativeUnavailable when nothing could be replaced, StartRefused when the logits changed.
    """
    before = packed_sample(PackedForward(loaded))
    count = _replace_all(loaded.model, kernels)
    if not count:
        raise NativeUnavailable(f"{type(loaded.model).__name__} has no module that they could compute")
    changed = replace(loaded, kernels=kernels)
    difference = packed_difference(packed_sample(PackedForward(changed)), before, loaded.dtype)
    if difference is not None:
        raise StartRefused(f"Compiled kernels change this model's logits {difference}: use --compile off.")
    log.info("compiled kernels compute %s", ", ".join(f"{n} {name}" for name, n in sorted(count.items())))
    return changed


def _kernels_for(loaded: LoadedModel, home: Path) -> NativeKernels:
    if loaded.device.type != "cpu":
        raise NativeUnavailable(f"they are for CPUs, the model is on {loaded.device}")
    if loaded.dtype is not torch.bfloat16:
        raise NativeUnavailable(f"they compute in bfloat16, the model in {str(loaded.dtype).split('.')[-1]}")
    if not loaded.rewindable:
        raise NativeUnavailable("the model keeps recurrent states")
    return NativeKernels(library(home))


def _replace_all(model: nn.Module, kernels: NativeKernels) -> Counter[str]:
    """Replace what can be, attention first so that its projections stay together; how many of each kind."""
    count: Counter[str] = Counter()
    for kind, name, is_equal in _KINDS:
        for parent in list(model.modules()):
            for child_name, child in list(parent.named_children()):
                if kind.fits(child):
                    made = kind(kernels, child)
                    if is_equal(child, made):
                        setattr(parent, child_name, made)
                        count[name] += 1
    return count


def _same_output(original: nn.Module, made: nn.Module) -> bool:
    """True if both give the same for random rows, up to rounding."""
    width = _input_width(original)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _CHECK_ROWS, width, generator=generator).bfloat16()
    expected, found = original(rows).float(), made(rows).float()
    spread = float(expected.std())
    return bool(
        (found - expected).abs().max() <= _MODULE_TOLERANCE * max(spread, 1e-6) + 2**-7 * expected.abs().max()
    )


def _input_width(module: Any) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features
    if hasattr(module, "gate_proj"):
        return int(module.gate_proj.in_features)
    return int(module.weight.numel())


def _always(_original: nn.Module, _made: nn.Module) -> bool:
    """Attention needs a step's context: the whole model's logits tell."""
    return True


_KINDS: tuple[tuple[Any, str, Callable[[nn.Module, nn.Module], bool]], ...] = (
    (NativeAttention, "attentions", _always),
    (NativeGatedMlp, "gated MLPs", _same_output),
    (NativeRmsNorm, "norms", _same_output),
    (NativeLinear, "projections", _same_output),
)
