"""What an attention backend is: a plan for each step, and one call of it for each layer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from engine.compute.attention.key_bias import KeyBias
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import Reach
from engine.plan.step_records import StepInputs


class LayerCall(NamedTuple):
    """How one layer attends. `window` and `softcap` None mean all positions and plain scores.

    With `chunk` a token sees its own chunk of so many positions alone. `sinks` [num_heads] are scores that
    take part in their heads' softmax and bring no value, as gpt-oss has them (StreamingLLM, Xiao et al.).
    `bias` is added to the scores; the compiled kernels and Triton's know none.
    """

    layer: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    bias: KeyBias | None = None

    @property
    def reach(self) -> Reach | None:
        """How far back a token sees, None for all that is before it."""
        return Reach.of(self.window, self.chunk)


class StepAttention(Protocol):
    """One step's attention, laid out once and called by every layer."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's new keys and values of `layer`, each [num_tokens, num_kv_heads, dim], packed."""
        ...

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Attend from the packed `query` [num_tokens, num_heads, key_dim] to each sequence's own positions.

        The step's keys and values are in the tensors already. Gives [num_tokens, num_heads, value_dim] in
        packed order. A token sees positions up to its own, as far back as `call.reach`; among drafts that
        form a tree, those of its own branch only.
        """
        ...


class AttentionBackend(Protocol):
    """A way to attend over the paged tensors of one device; stateless between steps."""

    def plan(self, inputs: StepInputs, kv: KvTensors) -> StepAttention:
        """Everything about a step that does not depend on the layer."""
        ...
