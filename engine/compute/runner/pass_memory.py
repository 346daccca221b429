"""PassMemory: what passes read and write beside their tokens, and how recorded ones are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from engine.compute.attention import AttentionContext
from engine.compute.attention.kv_tensors import KvTensors
from engine.plan.step_records import Int32, StepInputs


class PassRoom(NamedTuple):
    """The most that a pass has of anything, to be recorded once for all that fit.

    Of its tokens, `num_again` were part of an earlier pass, as drafts, and are mixed into a state once more.
    """

    num_sequences: int
    num_tokens: int
    num_again: int = 0


class PassMemory(Protocol):
    """Paged K/V, and whatever else a model carries from pass to pass. For the model's thread.

    A pass is between `begin`, or `fill` where it is recorded, and `commit`. Without the latter what the model
    carries of the pass's sequences is lost.
    """

    @property
    def kv(self) -> KvTensors:
        """The K/V of all layers that attend."""
        ...

    def begin(self, inputs: StepInputs) -> Any:
        """What PackedForward.compute, or its like, takes as the context of this pass."""
        ...

    def commit(self, inputs: StepInputs) -> None:
        """The pass was queued whole: its sequences may go on behind it."""
        ...

    def scratch(self) -> PassMemory:
        """Memory of the same kind for a pass of one token, which leaves this one as it is."""
        ...

    def num_again(self, inputs: StepInputs) -> int:
        """How many tokens of earlier passes the pass mixes once more."""
        ...

    def words(self, room: PassRoom) -> dict[str, tuple[int, ...]]:
        """What a recorded pass is told beside what its attention is told: names and shapes of arrays."""
        ...

    def fill(self, inputs: StepInputs, room: PassRoom) -> Mapping[str, Int32]:
        """Begin a recorded pass: what to put into these arrays, of which the rest becomes -1."""
        ...

    def recorded(
        self, attention: AttentionContext, arrays: Mapping[str, torch.Tensor], room: PassRoom
    ) -> Any:
        """As `begin`, for passes that read the arrays, on the device, when they are carried out."""
        ...
