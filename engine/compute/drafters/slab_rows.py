"""SlabRows: the rows that a layer reads of several sequences in one go, and how they attend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F

from engine.compute.attention import AttentionBackend, LayerCall, StepAttention
from engine.compute.attention.context import HeadNorms, HeadTurns, RotatingStep, context_over
from engine.compute.attention.kv_tensors import KvTensors, on_device
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.runner.dummy_steps import plain_sampling
from engine.plan.step_records import StepInputs

_NO_ROWS = np.zeros(0, np.int64)
_NO_SAMPLING = plain_sampling(_NO_ROWS)


class Span(NamedTuple):
    """So many rows of one sequence: their keys and values belong into its slab from slot `first` on."""

    slab: int
    first: int
    num_rows: int


class SlabRows(Protocol):
    """N rows of several sequences, one sequence behind the other."""

    @property
    def positions(self) -> torch.Tensor:
        """Where each is in its text, int64 [N]."""
        ...

    def newest(self, rows: torch.Tensor) -> torch.Tensor:
        """Of [N, ...] each sequence's last; themselves where each has one row."""
        ...

    def attend_newest(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Keep the rows' keys and values and attend from each sequence's newest row, within its own slab.

        `query` is [N, heads, dim], `key` and `value` are [N, kv_heads, their dim]. Gives [sequences, heads,
        value's dim].
        """
        ...

    def context(self) -> object:
        """What the layer of a model attends by from all rows, in place of a step's AttentionContext."""
        ...


class SlabLayout(Protocol):
    """Makes the SlabRows of spans."""

    def __call__(self, spans: Sequence[Span], positions: Sequence[int]) -> SlabRows:
        """Those of the spans' rows, which are at these positions [N]."""
        ...


class _Spans:
    """What is known of rows by their spans."""

    def __init__(self, spans: Sequence[Span], positions: Sequence[int], device: torch.device) -> None:
        self.positions = on_device(positions, device)
        self._stops = list(accumulate(span.num_rows for span in spans))

    def newest(self, rows: torch.Tensor) -> torch.Tensor:
        """See SlabRows."""
        return rows if len(rows) == len(self._stops) else rows[self._last]

    @cached_property
    def _last(self) -> torch.Tensor:
        return on_device([stop - 1 for stop in self._stops], self.positions.device)


class RowsApart(_Spans):
    """SlabRows on any device, of which each sequence attends by itself."""

    def __init__(self, kv: EagleKv, spans: Sequence[Span], positions: Sequence[int]) -> None:
        super().__init__(spans, positions, kv.keys.device)
        self._kv = kv
        self._spans = spans

    def attend_newest(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See SlabRows."""
        return self.attend(query, key, value, scale, [1] * len(self._spans))

    def context(self) -> object:
        """See SlabRows."""
        return _ContextApart(self, self._kv.tensors)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        asking: Sequence[int] = (),
    ) -> torch.Tensor:
        """As `attend_newest`, from so many rows of each sequence, the newest; else from all."""
        attended, row = [], 0
        own = asking or [span.num_rows for span in self._spans]
        for span, num_asking in zip(self._spans, own, strict=True):
            stop = row + span.num_rows
            keys, values, seen = self._kept(span, key[row:stop], value[row:stop])
            found = F.scaled_dot_product_attention(
                query[stop - num_asking : stop].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=seen[-num_asking:],
                scale=scale,
                enable_gqa=True,
            )
            attended.append(found[0].transpose(0, 1))
            row = stop
        return torch.cat(attended)

    def _kept(
        self, span: Span, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep keys and values of a span's rows, [count, kv_heads, dim], and give what these rows see.

        That is keys and values [kv_heads, seen, dim] and where each row may look among them, [count, seen].
        """
        kv, slab = self._kv, span.slab
        first, stop = span.first, span.first + span.num_rows
        kv.keys[slab, :, first:stop] = key.transpose(0, 1)
        kv.values[slab, :, first:stop] = value.transpose(0, 1)
        begin = max(0, first + 1 - kv.window)
        slots = torch.arange(begin, stop, device=key.device)
        own = torch.arange(first, stop, device=key.device)[:, None]
        seen = (slots <= own) & (slots > own - kv.window)
        return kv.keys[slab, :, begin:stop], kv.values[slab, :, begin:stop], seen


class RowsTogether(_Spans):
    """SlabRows that attend all at once, by a backend to which a slab is a block."""

    def __init__(
        self, backend: AttentionBackend, kv: EagleKv, spans: Sequence[Span], positions: Sequence[int]
    ) -> None:
        super().__init__(spans, positions, kv.keys.device)
        self._backend = backend
        self._kv = kv
        self._spans = spans

    def attend_newest(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See SlabRows."""
        self._all.write(0, key, value)
        return self._of_newest.attend(self.newest(query), LayerCall(0, scale, self._kv.window))

    def context(self) -> object:
        """See SlabRows."""
        return context_over(InWindow(self._all, self._kv.window), self._kv.tensors)

    @cached_property
    def _all(self) -> StepAttention:
        return self._planned(self._spans)

    @cached_property
    def _of_newest(self) -> StepAttention:
        if self._stops[-1] == len(self._spans):
            return self._all
        return self._planned([Span(slab, first + rows - 1, 1) for slab, first, rows in self._spans])

    def _planned(self, spans: Sequence[Span]) -> StepAttention:
        return self._backend.plan(slab_step(spans, self._kv.num_slots), self._kv.tensors)


def slab_step(spans: Sequence[Span], num_slots: int) -> StepInputs:
    """The spans as a step of sequences of which each has one block of so many slots; its tokens are any."""
    slabs, first, lengths = np.array(spans, np.int64).T
    stops = lengths.cumsum()
    slots = np.arange(stops[-1]) + np.repeat(first - stops + lengths, lengths)
    return StepInputs(
        token_ids=slots,
        positions=slots,
        slot_mapping=np.repeat(slabs * num_slots, lengths) + slots,
        query_lens=lengths.astype(np.int32),
        kv_lens=(first + lengths).astype(np.int32),
        block_tables=slabs[:, None].astype(np.int32),
        logits_rows=_NO_ROWS,
        sampling=_NO_SAMPLING,
    )


class InWindow:
    """A step of which all that attends sees so many positions at most, where layers know no such bound."""

    def __init__(self, step: StepAttention, window: int) -> None:
        self._step = step
        self._window = window

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""
        self._step.write(layer, key, value)

    @property
    def slots(self) -> torch.Tensor:
        """See RotatingStep."""
        return cast(RotatingStep, self._step).slots

    def rotate_and_write(
        self, layer: int, qkv: torch.Tensor, turns: HeadTurns | None, norms: HeadNorms | None
    ) -> torch.Tensor:
        """See RotatingStep: what fused layers ask of it."""
        return cast(RotatingStep, self._step).rotate_and_write(layer, qkv, turns, norms)

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """See StepAttention."""
        return self._step.attend(query, call._replace(window=self._window))


class _ContextApart:
    """What a pass of one layer over slabs gives its attention, in place of an AttentionContext."""

    def __init__(self, rows: RowsApart, kv: KvTensors) -> None:
        self.kv = kv
        self._rows = rows

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """See AttentionContext; no family with such a module has sinks, soft caps or biases."""
        assert call.softcap is None and call.sinks is None and call.bias is None
        return self._rows.attend(query, key, value, call.scaling)
