"""KvWriter: puts a step's new keys and values where its slots say, on any device."""

from __future__ import annotations

import torch

from engine.compute.attention.kv_tensors import KvTensors
from engine.plan.step_records import StepInputs


class KvWriter:
    """Writes layer after layer of one step; what does not depend on the layer is computed once."""

    def __init__(self, inputs: StepInputs, kv: KvTensors) -> None:
        self._kv = kv
        self._slot_mapping = inputs.slot_mapping
        self._rows: dict[int, torch.Tensor] = {}  # by number of KV heads

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""
        num_kv_heads = key.shape[1]
        rows = self._rows.get(num_kv_heads)
        if rows is None:
            slots = torch.tensor(self._slot_mapping, device=self._kv.device)  # [num_tokens]
            rows = self._rows[num_kv_heads] = self._kv.rows_of(slots, num_kv_heads)
        self._kv.write(layer, rows, key, value)
