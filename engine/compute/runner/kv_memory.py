"""KvMemory: the PassMemory of a model that carries K/V alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.compute.attention import AttentionContext
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.pass_memory import PassRoom
from engine.plan.step_records import Int32, StepInputs


class KvMemory:
    """Of paged K/V that somebody else owns; see PassMemory."""

    def __init__(self, forward: PackedForward, kv: KvTensors) -> None:
        self._forward = forward
        self.kv = kv

    def begin(self, inputs: StepInputs) -> AttentionContext:
        """See PassMemory."""
        return AttentionContext(inputs, self.kv, self._forward.backend)

    def commit(self, inputs: StepInputs) -> None:
        """See PassMemory."""

    def scratch(self) -> KvMemory:
        """See PassMemory."""
        kv = self.kv
        return KvMemory(self._forward, self._forward.make_kv(1, kv.block_size, kv.dtype))

    def num_again(self, inputs: StepInputs) -> int:
        """See PassMemory."""
        return 0

    def words(self, room: PassRoom) -> dict[str, tuple[int, ...]]:
        """See PassMemory."""
        return {}

    def fill(self, inputs: StepInputs, room: PassRoom) -> Mapping[str, Int32]:
        """See PassMemory."""
        return {}

    def recorded(
        self, attention: AttentionContext, arrays: Mapping[str, torch.Tensor], room: PassRoom
    ) -> AttentionContext:
        """See PassMemory."""
        return attention
