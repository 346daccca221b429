"""MtpLayer: a model's MTP module over K/V of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.compute.attention import LayerCall
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.eagle_kv import EagleKv, Span, of_last_rows
from engine.compute.drafters.eagle_torch import attend_in_slabs
from engine.compute.drafters.mtp_module import MtpModule


class MtpLayer:
    """A DraftLayer that can guess every token."""

    def __init__(self, module: MtpModule, kv: EagleKv) -> None:
        self._module = module
        self._kv = kv
        self._token_ids = torch.arange(module.vocab_size, device=module.weight.device)

    @property
    def token_ids(self) -> torch.Tensor:
        """See DraftLayer."""
        return self._token_ids

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftLayer; `features` are what left the target's last layer."""
        return self._module.read(features)

    def compute(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: Sequence[int],
        spans: Sequence[Span],
    ) -> torch.Tensor:
        """See DraftLayer."""
        where = torch.tensor(positions, device=hidden.device)
        context = SlabContext(self._kv, self._module.layer, spans)
        out: torch.Tensor = self._module(hidden, token_ids, where, context)
        return of_last_rows(out, spans)

    def again(self, out: torch.Tensor) -> torch.Tensor:
        """The output as it is: it is normed, as what is read of the target."""
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """See DraftLayer."""
        return self._module.logits(out)


class _Layers(NamedTuple):
    layers: tuple[LayerKv, ...]


class SlabContext:
    """What a pass of one layer over slabs gives its attention, in place of an AttentionContext."""

    def __init__(self, kv: EagleKv, layer: LayerKv, spans: Sequence[Span]) -> None:
        self.kv = _Layers((layer,))
        self._slabs = kv
        self._spans = spans

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """See AttentionContext; no family with such a module has sinks, soft caps or biases."""
        assert call.softcap is None and call.sinks is None and call.bias is None
        return attend_in_slabs(self._slabs, self._spans, query, key, value, call.scaling)
