"""What one step's forward pass carries to every attention layer."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, Protocol, cast

import torch

from engine.compute.attention.backend import AttentionBackend, LayerCall, StepAttention
from engine.compute.attention.cpu import PagedStep
from engine.compute.attention.kv_tensors import KvTensors, sent
from engine.compute.attention.paged_rows import PagedRows
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.step_records import StepInputs


class HeadNorms(NamedTuple):
    """Root-mean-square norms before heads are rotated.

    Both weights are [dim], or as wide as all heads, each queries' and keys', that are normed together. With
    `norms_values` values are normed too, each head by itself and by no weight.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    norms_values: bool = False


class HeadTurns(NamedTuple):
    """By which angles the first `num_turned` numbers of each head are rotated (Su et al. 2021).

    `cosines` and `sines` are [num_tokens, num_turned], or half as many where both numbers of a pair
    have the same. A pair is a number of each half, or with `of_neighbours` two that lie side by side, for
    which the first half of the columns counts; or with `in_order` their own columns.
    """

    cosines: torch.Tensor
    sines: torch.Tensor
    num_turned: int
    of_neighbours: bool = False
    in_order: bool = False


class KeyPages(NamedTuple):
    """A layer's keys [num_blocks, num_kv_heads, block_size, any], kept in this type, as a kernel writes them.

    `slots`, int32 [num_tokens] on the device, says where each token's belong; -1 for no token's.
    """

    pages: torch.Tensor
    slots: torch.Tensor
    block_size: int
    kept: torch.dtype


class RotatingStep(Protocol):
    """A StepAttention that also does what comes before attention, in one launch."""

    @property
    def slots(self) -> torch.Tensor:
        """Where each token's keys and values belong, int32 [num_tokens] on the device; -1 for no token's."""
        ...

    def rotate_and_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        turns: HeadTurns | None,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        """The queries of `qkv`; its keys and values are stored. See AttentionContext.rotate_and_attend."""
        ...


class AttentionContext:
    """Writes a layer's new keys and values into the paged tensors, then attends. Lives for one step."""

    def __init__(self, inputs: StepInputs, kv: KvTensors, backend: AttentionBackend) -> None:
        self.kv = kv
        self._inputs = inputs
        self._step = backend.plan(inputs, kv)
        self._handed: tuple[torch.Tensor, object, torch.Tensor] | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Attend from [num_tokens, num_heads, key_dim]; `key` and `value` are the step's new ones.

        Gives [num_tokens, num_heads, value_dim]. A layer that shares another's keys and values gets those,
        which are in their pages already. Everything attention costs in a layer happens in here.
        """
        if self.kv.layers[call.layer].shares is None:
            self._step.write(call.layer, key, value)
        return self._step.attend(query, call)

    @property
    def native_rows(self) -> PagedRows | None:
        """Every row of the step, where a kernel takes them all past `attend`; else None."""
        return self._step.rows if isinstance(self._step, PagedStep) else None

    @property
    def longest(self) -> int:
        """The most tokens that a sequence has with this step: no position is as far."""
        return int(self._inputs.kv_lens.max())

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where the step's keys and values belong, to write them without `attend`: int64 [num_tokens]."""
        return sent(self._inputs.slot_mapping, self.kv.device)

    def key_pages(self, layer: int) -> KeyPages:
        """Where a kernel writes the keys of a layer, of a backend whose steps are RotatingSteps."""
        kv = self.kv
        return KeyPages(kv.keys[layer], cast(RotatingStep, self._step).slots, kv.block_size, kv.dtype)

    def attend_written(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """As `attend`, for keys and values that are in the `slots` of their pages already."""
        return self._step.attend(query, call)

    def hand_on(self, rows: torch.Tensor, norm: object, normed: torch.Tensor) -> None:
        """Keep what a layer's answer `rows` are normed to by the next one's `norm`, until that one runs."""
        self._handed = rows, norm, normed

    def taken(self, rows: torch.Tensor, norm: object) -> torch.Tensor | None:
        """What was handed on last, where it is these very `rows` by this norm; it is given once."""
        handed, self._handed = self._handed, None
        return handed[2] if handed is not None and handed[0] is rows and handed[1] is norm else None

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        turns: HeadTurns | None,
        norms: HeadNorms | None,
        call: LayerCall,
    ) -> torch.Tensor:
        """As `attend`, from each token's queries, keys and values side by side, not normed and not rotated.

        `qkv` is [num_tokens, (num_heads + 2 * num_kv_heads) * dim] and may be written over; without `turns`
        nothing is rotated. It is queries alone for a layer that reads the keys and values of another. For a
        backend whose steps are RotatingSteps.
        """
        query = cast(RotatingStep, self._step).rotate_and_write(call.layer, qkv, turns, norms)
        return self._step.attend(query, call)


class _Laid:
    """An AttentionBackend whose steps are all one, which was planned before."""

    def __init__(self, step: StepAttention) -> None:
        self._step = step

    def plan(self, inputs: StepInputs, kv: KvTensors) -> StepAttention:
        """See AttentionBackend."""
        return self._step


def context_over(attention: StepAttention, kv: KvTensors) -> AttentionContext:
    """A context for steps that are not known when it is made: `attention` reads them from its tables."""
    any_step = pack_step([Part([0], 0, 1, [0])], kv.block_size)
    return AttentionContext(any_step, kv, _Laid(attention))
