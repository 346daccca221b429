"""StateKernel: compiled code that advances the states of recurrent layers; and what each kind is given."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class DeltaInputs(NamedTuple):
    """Rows of M tokens, float32; values may have the model's dtype, and then what comes of them may, too.

    `logs` are the decays' logarithms: one a head, or one a channel of a key. As many heads in a row as there
    are of them for each key head share its keys and queries.
    """

    query: Tensor  # [M, key_heads, key_dim]
    key: Tensor  # [M, key_heads, key_dim]
    value: Tensor  # [M, heads, value_dim]
    logs: Tensor  # [M, heads, 1 or key_dim]
    beta: Tensor  # [M, heads]


class StructuredInputs(NamedTuple):
    """Rows of M tokens. Heads in a row, as many as there are for each group, share its b and c.

    But for `logs`, which are float32, all may have the model's dtype, and then what comes of them may, too.
    """

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


class ConvInputs(NamedTuple):
    """N new rows, in the model's dtype, and those that slots keep: from `before` before a state's end on.

    The first columns are convolved, and go through SiLU where they are `activated`.
    """

    rows: Tensor  # [N, row_width]
    kept: Tensor  # [slots, num_kept, row_width]
    weight: Tensor  # [channels, taps]
    bias: Tensor | None  # [channels]
    before: int
    num_mixed: int  # M
    activated: bool


class GatedDelta(NamedTuple):
    """A layer of gated delta nets behind its convolution: M rows in the model's dtype, and its parameters.

    A row has queries and keys [key_heads, keys], values [heads, values], what becomes beta [heads], and what
    becomes steps [heads], of which, with `bias`, softplus and the exponentials of `decays` make decays.
    """

    rows: Tensor  # [M, 2 * key_heads * keys + heads * values + 2 * heads]
    decays: Tensor  # [heads] logarithms
    bias: Tensor  # [heads]
    key_heads: int
    keys: int
    values: int
    beta: float  # that a gate of 1 stands for


class GatedStructured(NamedTuple):
    """A layer of Mamba 2 behind its convolution: M rows in the model's dtype, and its parameters.

    A row has inputs [heads, dim], b and c [groups, size], and what becomes steps [heads], with `bias` and
    softplus, and within `limits`. Each output gets its input times `direct`.
    """

    rows: Tensor  # [M, heads * dim + 2 * groups * size + heads]
    decays: Tensor  # [heads] logarithms
    bias: Tensor  # [heads]
    direct: Tensor  # [heads]
    dim: int
    groups: int
    size: int
    limits: tuple[float, float]


class StateKernel(Protocol):
    """The scans of delta_rule.py and state_space.py over states [slots, ...] and `runs` as SlotStep has them.

    A token's result has the same bits in any company, and but for whole chunks of prompts, which a kernel may
    take in together, however many of its sequence come in one pass. None, and nothing has changed, for sizes
    that are not computed.
    """

    def convolve(self, inputs: ConvInputs, runs: Tensor, joins: Tensor) -> Tensor | None:
        """As `convolve` does, of the M rows that are mixed, with their other columns: [M, row_width].

        `kept` then has what the next pass may need. `joins` is as SlotStep has it.
        """
        ...

    def delta(self, inputs: DeltaInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `delta_scan`."""
        ...

    def gated_delta(self, inputs: GatedDelta, state: Tensor, runs: Tensor) -> Tensor | None:
        """All that is between a layer's convolution and its norm: [M, heads, values] in the rows' dtype."""
        ...

    def gated_structured(self, inputs: GatedStructured, state: Tensor, runs: Tensor) -> Tensor | None:
        """All that is between a layer's convolution and its norm: [M, heads, dim] in float32."""
        ...

    def structured(self, inputs: StructuredInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `structured_scan`."""
        ...

    def selective(self, inputs: SelectiveInputs, state: Tensor, runs: Tensor) -> Tensor | None:
        """As `selective_scan`."""
        ...
