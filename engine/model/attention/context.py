"""What one step's forward pass carries to every attention layer."""

from __future__ import annotations

import torch

from engine.model.attention.backend import AttentionBackend, LayerCall
from engine.model.kv_tensors import KvTensors
from engine.outputs import StepInputs


class AttentionContext:
    """Writes a layer's new keys and values into the paged tensors, then attends. Lives for one step."""

    def __init__(self, inputs: StepInputs, kv: KvTensors, backend: AttentionBackend) -> None:
        self.kv = kv
        self.slots = torch.tensor(inputs.slot_mapping, device=kv.device)  # [num_tokens]
        self._rows: dict[int, torch.Tensor] = {}  # by number of KV heads
        self._step = backend.plan(inputs, kv)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Attend from [num_tokens, num_heads, key_dim]; `key` and `value` are the step's new ones.

        Gives [num_tokens, num_heads, value_dim]. Everything attention costs in a layer happens in here.
        """
        num_kv_heads = key.shape[1]
        rows = self._rows.get(num_kv_heads)
        if rows is None:
            rows = self._rows[num_kv_heads] = self.kv.rows_of(self.slots, num_kv_heads)
        self.kv.write(call.layer, rows, key, value)
        return self.attend_written(query, call)

    def attend_written(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """As `attend`, for who has put the keys and values of the step's `slots` in their places already."""
        return self._step.attend(query, call)
