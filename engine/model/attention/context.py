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
        self._step = backend.plan(inputs, kv)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Attend from [num_tokens, num_heads, key_dim]; `key` and `value` are the step's new ones.

        Gives [num_tokens, num_heads, value_dim]. Everything attention costs in a layer happens in here.
        """
        self._step.write(call.layer, key, value)
        return self._step.attend(query, call)
