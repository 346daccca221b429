"""DeltaKernel: compiled code for the gated delta rule; and what the rule is given."""

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


class DeltaKernel(Protocol):
    """Compiled code for the same."""

    def scan_delta(self, inputs: DeltaInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `delta_scan`, over states [slots, heads, key_dim, value_dim] and `runs` as SlotStep has them.

        A token's result has the same bits however many come in one pass. None, and nothing has changed, for
        sizes that it does not compute.
        """
        ...
