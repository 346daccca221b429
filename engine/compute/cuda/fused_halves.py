"""FusedHalves: a layer around latent attention, whose sums are computed with what is beside them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from engine.compute.attention import CONTEXT_KEYWORD, AttentionContext
from engine.compute.cuda.fused_latent import FusedLatentAttention
from engine.compute.cuda.fused_norms import FusedNorm, Sum, add_and_norm, norm
from engine.compute.cuda.fused_parts import FusedMlp
from engine.compute.cuda.fused_products import OF_ROWS, Products
from engine.compute.cuda.fused_shared import FusedSharing
from engine.compute.cuda.layer_links import link
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.families import is_around_latent_attention
from engine.compute.native.observation import Seen, observe
from engine.compute.native.places import is_unhooked

log = logging.getLogger("slipstream.model")

_PARTS = {
    "input_layernorm": FusedNorm,
    "self_attn": FusedLatentAttention,
    "post_attention_layernorm": FusedNorm,
    "mlp": nn.Module,  # an MLP, or a mixture that is called as it is
}


class FusedHalves(nn.Module):
    """A layer with the parts of `original`, which are fused already, equal to it up to rounding."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.input_layernorm: FusedNorm = original.input_layernorm
        self.self_attn: Any = original.self_attn
        self.post_attention_layernorm: FusedNorm = original.post_attention_layernorm
        self.mlp: Any = original.mlp
        self.multiplier = float(getattr(original, "residual_scale", 1.0))
        self.next_norm: FusedNorm | None = None  # see FusedLayer

    @staticmethod
    def fits(layer: Any) -> bool:
        """True for one that can be computed; its output is still to be compared."""
        parts = dict(layer.named_children())
        return (
            is_around_latent_attention(layer)
            and is_unhooked(layer)
            and parts.keys() == _PARTS.keys()
            and all(isinstance(part, _PARTS[name]) for name, part in parts.items())
        )

    @property
    def input_norm(self) -> FusedNorm:
        """What its input is normed by."""
        return self.input_layernorm

    @property
    def ends_in_sum(self) -> bool:
        """See FusedLayer."""
        return self._mlp_that_adds is None

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """[1, N, hidden] to the same, with the keyword `slipstream_context`."""
        context: AttentionContext = options[CONTEXT_KEYWORD]
        rows = hidden_states[0].contiguous()
        given = context.taken(hidden_states, self.input_norm)
        if given is None:
            given = norm(rows, self.input_norm)
        attended, _ = self.self_attn(given[None], **options)
        rows, normed_next = self.finished(*self.middle(rows, attended[0]), OF_ROWS)
        answer = rows[None]
        if normed_next is not None:
            context.hand_on(answer, self.next_norm, normed_next)
        return answer

    def middle(self, rows: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the MLP is given, and what its answer is added to, all [N, hidden]."""
        total, normed = add_and_norm(
            rows, attended, self.post_attention_layernorm, multiplier=self.multiplier
        )
        return normed, total

    def finished(
        self,
        normed: torch.Tensor,
        total: torch.Tensor,
        products: Products,
        brought: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See FusedLayer."""
        mlp = self._mlp_that_adds
        if mlp is not None:
            return mlp.joined.added(normed, total, products, self.multiplier), None
        is_left = isinstance(self.mlp, FusedSharing)  # what it answers, to be summed here
        answer = self.mlp.computed(normed) if is_left else self.mlp(normed[None])[0]
        return Sum(total, answer, multiplier=self.multiplier).computed(self.next_norm)

    @property
    def _mlp_that_adds(self) -> FusedMlp | None:
        """Its MLP, where that one's last product adds what it answers."""
        if not isinstance(self.mlp, FusedMlp):
            return None
        is_plain = type(self.mlp.joined.down) is nn.Linear
        return self.mlp if self.multiplier == 1.0 or is_plain else None


@torch.inference_mode()
def fuse_halves(loaded: LoadedModel, block_size: int) -> int:
    """Replace each layer around latent attention that answers alike: how many there were.

    Raises whatever a compiler or driver does.
    """
    names = [name for name, module in loaded.model.named_modules() if FusedHalves.fits(module)]
    if loaded.keeps_state or not names:
        return 0
    watched = [f"{name}{part}" for name in names for part in ("", ".self_attn", ".mlp")]
    seen = observe(loaded, watched, block_size).seen
    layers: dict[str, FusedHalves] = {}
    for name in names:
        made = _equal(loaded.model.get_submodule(name), name, seen)
        if made is None:
            log.debug("%s answers otherwise when fused: the layer stays", name)
            continue
        loaded.model.set_submodule(name, made)
        layers[name] = made
    link(layers, seen)
    return len(layers)


def _equal(original: Any, name: str, seen: dict[str, Seen]) -> FusedHalves | None:
    """The layer fused; None unless it gives its parts what they were seen to be given, and answers alike.

    What its parts answer is what they were seen to answer: they are the original's.
    """
    layer, attention, mlp = (seen.get(f"{name}{part}") for part in ("", ".self_attn", ".mlp"))
    if layer is None or attention is None or mlp is None or layer.args[1:]:
        return None
    given, before_attention, before_mlp = layer.given, attention.given, mlp.given
    if given is None or before_attention is None or before_mlp is None:
        return None
    made = FusedHalves(original)
    rows = given[0].contiguous()
    normed, total = made.middle(rows, attention.output[0][0])
    pairs = (
        (norm(rows, made.input_norm), before_attention[0]),
        (normed, before_mlp[0]),
        (made.finished(before_mlp[0].contiguous(), total, OF_ROWS)[0], layer.output[0]),
    )
    return made if all(is_close(found, expected) for found, expected in pairs) else None
