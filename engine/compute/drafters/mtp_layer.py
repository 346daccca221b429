"""MtpLayer: a model's MTP module as a layer that chains are drawn from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.compute.attention import LayerCall
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.mtp_module import MtpModule
from engine.compute.drafters.slab_rows import SlabRows


class MtpLayer:
    """A DraftLayer that can guess every token."""

    def __init__(self, module: MtpModule) -> None:
        self._module = module
        self._token_ids = torch.arange(module.vocab_size, device=module.weight.device)

    @property
    def token_ids(self) -> torch.Tensor:
        """See DraftLayer."""
        return self._token_ids

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """See DraftLayer; `features` are what left the target's last layer."""
        return self._module.read(features)

    def compute(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        """See DraftLayer."""
        context = SlabContext(self._module.layer, rows)
        out: torch.Tensor = self._module(hidden, token_ids, rows.positions, context)
        return rows.newest(out)

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

    def __init__(self, layer: LayerKv, rows: SlabRows) -> None:
        self.kv = _Layers((layer,))
        self._rows = rows

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """See AttentionContext; no family with such a module has sinks, soft caps or biases."""
        assert call.softcap is None and call.sinks is None and call.bias is None
        return self._rows.attend(query, key, value, call.scaling)
