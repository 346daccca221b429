"""Norms, MLPs and projections by themselves in fewer launches: for layers that are not fused as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from engine.compute.cuda.fused_mlp import JoinedMlp
from engine.compute.cuda.fused_norms import FusedGatedNorm, FusedNorm, eps_of, frozen
from engine.compute.cuda.fused_products import OF_ROWS, joined
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.observation import Seen, observe
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import NormKind
from engine.compute.runner.scratch_pass import forward_of

log = logging.getLogger("slipstream.model")

_MOST_NORMED = 1 << 14  # numbers that one program norms
_NORMED = 3  # rows by which a norm is compared
_JOINED = ("in_proj_qkv", "in_proj_b", "in_proj_a")  # of a gated delta net, in the order of its rows


class FusedMlp(nn.Module):
    """An MLP whose gate and up are one projection: three launches."""

    num_given: ClassVar[int] = 1

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.joined = JoinedMlp(original)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        answer = self.joined.computed(hidden_states.flatten(0, -2), OF_ROWS)
        return answer.view(*hidden_states.shape[:-1], -1)


Part: TypeAlias = FusedNorm | FusedGatedNorm | FusedMlp  # each is called with `num_given` tensors


@torch.inference_mode()
def fuse_parts(loaded: LoadedModel, block_size: int) -> int:
    """Replace each norm and MLP that answers alike, and join projections: how many parts there were.

    Raises whatever a compiler or driver does.
    """
    forward_of(loaded)  # puts mixers into the model, by which its modules are called
    for module in list(loaded.model.modules()):
        _join(module, loaded.dtype)
    makers = {name: list(_makers(module, loaded.dtype)) for name, module in loaded.model.named_modules()}
    makers = {name: made for name, made in makers.items() if made}
    observation = observe(loaded, makers, block_size)
    count = 0
    for name, makes in makers.items():
        seen = observation.seen.get(name)
        fused = seen and _equal(loaded.model.get_submodule(name), seen, makes)
        if fused is None:
            log.debug("%s answers otherwise when fused: it stays", name)
            continue
        loaded.model.set_submodule(name, fused)
        count += 1
    return count


def quick_norm(norm: Any) -> nn.Module:
    """A norm of rows in one launch, if one answers alike; else the norm itself.

    Raises whatever a compiler or driver does.
    """
    rows = torch.randn(_NORMED, len(norm.weight)).to(norm.weight)
    made = _equal(norm, Seen((rows,), {}, norm(rows)), list(_makers(norm, rows.dtype)))
    return norm if made is None else made


def _makers(module: Any, dtype: torch.dtype) -> Iterator[Callable[[Any], Part]]:
    """What may stand in for a module, to be compared with it."""
    name = type(module).__name__
    if name.endswith("MLP") and JoinedMlp.can_join(module, dtype) and all(map(is_unhooked, module.modules())):
        yield FusedMlp
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or len(weight) > _MOST_NORMED:
        return
    if not is_unhooked(module) or eps_of(module) is None or next(module.children(), None) is not None:
        return
    if name.endswith("RMSNormGated"):
        yield FusedGatedNorm
    elif name.endswith("RMSNorm"):
        yield lambda original: FusedNorm(original, NormKind.ROUNDED)
        yield lambda original: FusedNorm(original, NormKind.ONE_MORE)
    elif name.endswith("LayerNorm") and name != "LayerNorm" and getattr(module, "bias", None) is None:
        yield lambda original: FusedNorm(original, NormKind.CENTRED)


def _equal(original: Any, seen: Seen, makes: list[Callable[[Any], Part]]) -> Part | None:
    """The first that repeats what the original was seen to answer; none for one called in an unusual way."""
    if not isinstance(seen.output, torch.Tensor) or seen.options:
        return None
    for make in makes:
        made = make(original)
        if len(seen.args) == made.num_given and is_close(made(*seen.args), seen.output):
            return made
    return None


def _join(layer: Any, dtype: torch.dtype) -> None:
    """Have a gated delta net project its rows at once; its own projections become parts of that one."""
    linears: list[Any] = [getattr(layer, name, None) for name in _JOINED]
    if not all(type(linear) is nn.Linear and linear.weight.dtype is dtype for linear in linears):
        return
    if any(linear.bias is not None for linear in linears) or not all(map(is_unhooked, linears)):
        return
    together: Any = joined(linears)
    parts = torch.split(together.weight.detach(), [len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight = frozen(part)
    layer.in_proj_together = together
