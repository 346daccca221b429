"""StateKernel: compiled code that advances the states of recurrent layers; and what each kind is given."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class DeltaInputs(NamedTuple):
    """Rows of M tokens, float32. `logs` are the decays' logarithms: one a head, or one a channel of a key.

    As many heads in a row as there are of them for each key head share its keys and queries.
    """

    query: Tensor  # [M, key_heads, key_dim]
    key: Tensor  # [M, key_heads, key_dim]
    value: Tensor  # [M, heads, value_dim]
    logs: Tensor  # [M, heads, 1 or key_dim]
    beta: Tensor  # [M, heads]


class StructuredInputs(NamedTuple):
    """Rows of M tokens, float32. Heads in a row, as many as there are for each group, share its b and c."""

    inputs: Tensor  # [M, heads, dim]
    logs: Tensor  # [M, heads] logarithms of decays, negative
    b: Tensor  # [M, groups, size]
    c: Tensor  # [M, groups, size]


class SelectiveInputs(NamedTuple):
    """Rows of M tokens, float32."""

    inputs: Tensor  # [M, channels]
    steps: Tensor  # [M, channels]
    rates: Tensor  # [channels, size], negative
    b: Tensor  # [M, size]
    c: Tensor  # [M, size]


class StateKernel(Protocol):
    """The scans of delta_rule.py and state_space.py over states [slots, ...] and `runs` as SlotStep has them.

    A token's result has the same bits however many come in one pass. None, and nothing has changed, for
    sizes that are not computed.
    """

    def delta(self, inputs: DeltaInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `delta_scan`."""
        ...

    def structured(self, inputs: StructuredInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `structured_scan`."""
        ...

    def selective(self, inputs: SelectiveInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `selective_scan`."""
        ...
