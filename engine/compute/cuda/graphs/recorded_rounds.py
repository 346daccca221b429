"""RecordedSteps: rounds of drafts as recordings: one reads, another draws each further draft of the chains.

A layer of some hundred operations takes the device less time than it takes the host to queue them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from engine.compute.attention import LayerCall, StepAttention
from engine.compute.attention.context import context_over
from engine.compute.cuda.graphs.graph_shapes import MAX_QUERY_LEN, sizes_up_to
from engine.compute.cuda.graphs.recorder import Recorder
from engine.compute.cuda.graphs.step_graphs import BYTES_OF_A_GRAPH, TabledAttention
from engine.compute.cuda.triton_tables import Bucket, StepTables
from engine.compute.cuda.triton_work import HeadShape
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_round import EagleRound
from engine.compute.drafters.layer_chains import DraftLayer, EagerSteps, Likeliest
from engine.compute.drafters.slab_rows import InWindow, Span, slab_step
from engine.compute.loading.loader import LoadedModel
from engine.plan.step_records import Int32

# How many rows are read at a time, and chains drawn. A layer's weights are read once for all of them.
_READING = (8, 16, 32, 64, 128, 256, 512)
_DRAWING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Among a step's words: where its rows are in their texts, and of those that are read their tokens, and which
# are the newest of their sequences.
_WHERE, _TOKENS, _NEWEST = "where", "token_ids", "newest"
_ADVANCING = (_WHERE, "positions", "slots", "kv_lens")  # by one, from depth to depth


class RoundSize(NamedTuple):
    """Up to so many rows of so many sequences; 0 rows: one of each, behind what the device knows."""

    num_rows: int
    num_sequences: int

    @property
    def bucket(self) -> Bucket:
        """What its attention needs; to this a slab is a block."""
        if not self.num_rows:
            return Bucket(self.num_sequences, self.num_sequences, 1)
        return Bucket(self.num_sequences, self.num_rows, 1, min(self.num_rows, MAX_QUERY_LEN))

    @property
    def words(self) -> dict[str, tuple[int, ...]]:
        """What is sent beside that."""
        if not self.num_rows:
            return {_WHERE: (self.num_sequences,)}
        return {_WHERE: (self.num_rows,), _TOKENS: (self.num_rows,), _NEWEST: (self.num_sequences,)}

    def holds(self, work: EagleRound) -> bool:
        """Whether all rows of a round fit."""
        return (
            sum(work.num_rows) <= self.num_rows
            and len(work.num_rows) <= self.num_sequences
            and max(work.num_rows) <= MAX_QUERY_LEN
        )


class _Memory(NamedTuple):
    """What recordings of all sizes use in turn, each the first rows, for those of the largest."""

    words: torch.Tensor  # int32 [words]
    features: torch.Tensor  # [rows, width]
    token_ids: torch.Tensor  # int64 [sequences]
    hidden: torch.Tensor  # [sequences, hidden] what the layer takes in, and of it what it takes in next
    found: Likeliest  # [sequences, ...]


class _Parts(NamedTuple):
    """What recordings are made of."""

    layer: DraftLayer
    kv: EagleKv
    memory: _Memory


class _TabledRows:
    """SlabRows that are where the tables say when they are computed."""

    def __init__(self, kv: EagleKv, attention: StepAttention, words: Mapping[str, torch.Tensor]) -> None:
        self.positions = words[_WHERE].long().clamp_(min=0)
        self._kv = kv
        self._attention = attention
        self._newest = words[_NEWEST].long().clamp_(min=0) if _NEWEST in words else None

    def newest(self, rows: torch.Tensor) -> torch.Tensor:
        """See SlabRows."""
        return rows if self._newest is None else rows.index_select(0, self._newest)

    def attend_newest(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See SlabRows; the others are asked, too: they are not worth tables of their own."""
        self._attention.write(0, key, value)
        return self.newest(self._attention.attend(query, LayerCall(0, scale, self._kv.window)))

    def context(self) -> object:
        """See SlabRows."""
        return context_over(InWindow(self._attention, self._kv.window), self._kv.tensors)


class _Recording:
    """A step of a round, over memory that stays where it is; what is padding computes nothing of use."""

    def __init__(self, size: RoundSize, tables: StepTables, attention: StepAttention, parts: _Parts) -> None:
        self._size = size
        self._tables = tables
        self._attention = attention
        self._parts = parts
        self._replay: Callable[[], None] = self._read if size.num_rows else self._go_deeper

    def record(self, recorder: Recorder) -> None:
        """Have it recorded, over no row. Raises what keeps it from that."""
        self._tables.clear()
        self._replay = recorder.record(self._replay)

    def fill(self, spans: list[Span], words: Mapping[str, list[int]], num_to_come: int = 0) -> None:
        """Send where its rows are, in one asynchronous copy; so many more replays may follow the first."""
        others: dict[str, Int32] = {name: np.array(each, np.int32) for name, each in words.items()}
        self._tables.fill(slab_step(spans, self._parts.kv.num_slots), others, num_to_come)

    def replay(self) -> None:
        """Queue the step."""
        self._replay()

    def _read(self) -> None:
        arrays, (layer, kv, memory) = self._tables.arrays.views, self._parts
        token_ids = arrays[_TOKENS].long().clamp_(min=0)
        hidden = layer.read(memory.features[: self._size.num_rows])
        self._tell(layer.compute(hidden, token_ids, _TabledRows(kv, self._attention, arrays)))

    def _go_deeper(self) -> None:
        """A depth; what it was computed from is one further behind it."""
        arrays, (layer, kv, memory) = self._tables.arrays.views, self._parts
        count = self._size.num_sequences
        rows = _TabledRows(kv, self._attention, arrays)
        self._tell(layer.compute(memory.hidden[:count], memory.token_ids[:count], rows))
        for name in _ADVANCING:
            arrays[name].add_(arrays[name] >= 0)  # -1 is what is not used

    def _tell(self, out: torch.Tensor) -> None:
        """Put down what comes of what left the layer, [sequences, hidden]."""
        layer, _, memory = self._parts
        found = Likeliest.of(layer.logits(out), memory.found.places.shape[1])
        kept = memory.hidden, *memory.found
        for target, told in zip(kept, (layer.again(out), *found), strict=True):
            target[: len(out)].copy_(told)


class RecordedSteps:
    """ChainSteps that are replayed; those of a round that no recording holds are computed by `eager`.

    None does before `record`. For one thread.
    """

    def __init__(self, eager: EagerSteps, kv: EagleKv) -> None:
        self.layer = eager.layer
        self.num_guesses = eager.num_guesses
        self._eager = eager
        self._kv = kv
        self._recorded: dict[RoundSize, _Recording] = {}  # the smallest first
        self._memory: _Memory | None = None
        self._work: EagleRound | None = None
        self._begun: _Recording | None = None

    @property
    def sizes(self) -> tuple[RoundSize, ...]:
        """What the recordings hold."""
        return tuple(self._recorded)

    @torch.inference_mode()
    def record(self, backend: TabledAttention, recorder: Recorder, features: torch.Tensor) -> None:
        """Record all sizes; `features` [1, width] are any. Raises what keeps one of them from it."""
        heads, found, hidden = self._probe(backend, features)
        kv, device = self._kv.tensors, features.device
        sizes = round_sizes(kv.num_blocks)[::-1]  # the largest takes the memory that the others share
        workforce = backend.workforce(kv)
        tables = [StepTables(device, workforce, size.bucket) for size in sizes]
        num_words = max(own.room(heads, size.words) for own, size in zip(tables, sizes, strict=True))
        num_rows, num_sequences = _most(sizes)
        memory = _Memory(
            torch.empty(num_words, dtype=torch.int32, device=device),
            features.new_zeros((num_rows, features.shape[1])),
            torch.zeros(num_sequences, dtype=torch.int64, device=device),
            hidden.new_zeros((num_sequences, hidden.shape[1])),
            Likeliest(*(part.new_zeros((num_sequences, part.shape[1])) for part in found)),
        )
        parts, recorded = _Parts(self.layer, self._kv, memory), {}
        for size, own in zip(sizes, tables, strict=True):
            own.reserve(heads, size.words, memory.words)
            recorded[size] = _Recording(size, own, backend.step(own, kv), parts)
            recorded[size].record(recorder)
        self._memory, self._recorded = memory, dict(sorted(recorded.items()))

    def start(self, work: EagleRound) -> Likeliest:
        """See ChainSteps."""
        self._work, self._begun = work, None
        recording = next((self._recorded[size] for size in self._recorded if size.holds(work)), None)
        if recording is None or self._memory is None:
            found = self._eager.start(work)
            if self._memory is not None:
                out = self._eager.newest()[: len(self._memory.hidden)]
                self._memory.hidden[: len(out)].copy_(self.layer.again(out))
            return found
        self._memory.features[: len(work.features)].copy_(work.features, non_blocking=True)
        words = {_WHERE: work.positions, _TOKENS: work.token_ids, _NEWEST: work.newest_rows}
        recording.fill(work.spans, words)
        return self._replayed(recording, len(work.slabs))

    def go_on(self, token_ids: torch.Tensor) -> Likeliest:
        """See ChainSteps."""
        count = len(token_ids)
        recording = self._begun or self._begin(count)
        if recording is None or self._memory is None:
            return self._eager.go_on(token_ids)
        self._memory.token_ids[:count].copy_(token_ids)
        return self._replayed(recording, count)

    def _begin(self, count: int) -> _Recording | None:
        """The recording for the first sequences, ready for their second drafts; None if there is none."""
        work, self._work = self._work, None  # that has gone on otherwise, if not so
        fits = (size for size in self._recorded if not size.num_rows and size.num_sequences >= count)
        size = next(fits, None)
        if size is None or work is None:
            return None
        recording = self._begun = self._recorded[size]
        spans = [Span(slab, first + 1, 1) for slab, first, _ in work.newest_spans[:count]]
        positions = [work.positions[row] + 1 for row in work.newest_rows[:count]]
        recording.fill(spans, {_WHERE: positions}, work.most_drafts - 2)
        return recording

    def _replayed(self, recording: _Recording, count: int) -> Likeliest:
        assert self._memory is not None, "what was recorded has it"
        recording.replay()
        return Likeliest(*(part[:count] for part in self._memory.found))

    def _probe(
        self, backend: TabledAttention, features: torch.Tensor
    ) -> tuple[tuple[HeadShape, ...], Likeliest, torch.Tensor]:
        """What one row shows: the heads that attend, what is told, and what is taken in next."""
        kv, layer = self._kv, self.layer
        tables = StepTables(features.device, backend.workforce(kv.tensors))
        zero = torch.zeros(1, dtype=torch.int64, device=features.device)
        tables.fill(slab_step([Span(0, 0, 1)], kv.num_slots))
        rows = _TabledRows(kv, backend.step(tables, kv.tensors), {_WHERE: zero})
        out = layer.compute(layer.read(features), zero, rows)
        return tables.shapes, Likeliest.of(layer.logits(out), self.num_guesses), layer.again(out)


def round_sizes(most: int) -> list[RoundSize]:
    """What is recorded where there are up to so many sequences, the smallest first."""
    drawing = sizes_up_to(_DRAWING, most)
    reading = sizes_up_to(_READING, most * MAX_QUERY_LEN)
    sizes = [RoundSize(rows, min(rows, drawing[-1])) for rows in reading]
    return [*(RoundSize(0, count) for count in drawing), *sizes]


def recorded_round_bytes(loaded: LoadedModel, width: int, num_seqs: int) -> int:
    """About what recordings take of the device's memory beside a target with so many sequences.

    Features of it have so many numbers.
    """
    sizes = round_sizes(num_seqs)
    num_rows, num_sequences = _most(sizes)
    number = loaded.dtype.itemsize
    of_logit = number + 3 * torch.float32.itemsize  # as the layer gives it, as a number, a chance, and kept
    of_rows = num_rows * width * number + num_sequences * loaded.vocab_size * of_logit
    return len(sizes) * BYTES_OF_A_GRAPH + of_rows


def _most(sizes: list[RoundSize]) -> RoundSize:
    return RoundSize(max(size.num_rows for size in sizes), max(size.num_sequences for size in sizes))
