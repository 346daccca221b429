"""NativeEagle: a drafter's one layer on the kernels, a whole round of all sequences in one call."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from engine.compute.attention import PagedRows
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_round import EagleRound
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.native import records
from engine.compute.native.kernels import MAX_GROUP, MAX_HEAD_DIM, PANEL, VECTOR, NativeKernels, NormWeights
from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import Draw
from engine.compute.native.rotation_table import RotationTable
from engine.compute.native.scratch import kept_numbers
from engine.plan.step_records import NO_TOKEN, Int64

_GAP_BLOCK = 64  # as draw.h has it
_DRAWN = (torch.bfloat16, torch.float32)  # what logits may be


class NativeEagle:
    """An EagleCompute; see TorchEagle, whose drafts it makes but for rounding.

    Keeps packed copies of the weights, and of the embeddings of the tokens that it can guess.
    """

    def __init__(
        self, weights: EagleWeights, kernels: NativeKernels, kv: EagleKv, least_chance: float
    ) -> None:
        sizes = weights.sizes
        self._weights = weights
        self._kernels = kernels
        self._kv = kv
        self._token_ids = weights.token_ids.numpy()
        self._names = torch.zeros(_padded(len(weights.token_ids)) + _GAP_BLOCK, dtype=torch.int32)
        self._names[: len(weights.token_ids)] = weights.token_ids
        with torch.inference_mode():
            self._embedding = weights.embedding(weights.token_ids).contiguous()
        head, bias = _padded_head(weights.head)
        parts = (weights.fuse, weights.qkv, weights.output, weights.gate_up, weights.down)
        self._products: list[PackedWeights] = [
            *(kernels.pack(part) for part in parts),
            kernels.pack(head, bias),
        ]
        norms = (weights.hidden_norm, weights.input_norm, weights.mlp_norm, weights.last_norm)
        self._eagle = records.Eagle(
            *(NormWeights(norm, weights.eps).record for norm in norms),
            *(product.record for product in self._products),
            *(tensor.data_ptr() for tensor in (self._embedding, kv.keys, kv.values)),
            *(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim),
            *(weights.down.shape[1], weights.norms_residual, least_chance),
        )
        self._rotations = RotationTable(weights.rotary, weights.head)
        self._scratch = torch.empty(0, dtype=kernels.dtype)

    @staticmethod
    def fits(weights: EagleWeights, kernels: NativeKernels) -> bool:
        """True for a layer that can be computed so."""
        sizes = weights.sizes
        matrices = (weights.fuse, weights.qkv, weights.output, weights.gate_up, weights.down)
        return (
            kernels.dtype in _DRAWN
            and weights.head.device.type == "cpu"
            and weights.embedding.weight.dtype is kernels.dtype
            and all(kernels.packs(matrix, kernels.dtype) for matrix in matrices)
            and sizes.hidden % VECTOR == 0
            and weights.down.shape[1] % PANEL == 0
            and sizes.head_dim % PANEL == 0
            and sizes.head_dim <= MAX_HEAD_DIM
            and sizes.heads % sizes.kv_heads == 0
            and sizes.heads <= MAX_GROUP * sizes.kv_heads
        )

    @torch.inference_mode()
    def run(self, work: EagleRound) -> Int64:
        """See EagleCompute."""
        sizes, most, num_sequences = self._weights.sizes, work.most_drafts, len(work.num_rows)
        depths = np.arange(max(1, most))[:, None]
        counts = np.where(depths == 0, work.num_rows, 1).astype(np.int32)
        lengths = (work.num_kept + work.num_rows + depths).astype(np.int32)  # [passes, J]
        drawing = (work.num_drafts > np.arange(most)[:, None]).sum(axis=1)
        last = np.cumsum(work.num_rows, dtype=np.int64) - 1
        positions, slots = self._places(work, last, drawing)
        cos, sin = self._rotations.rows(torch.from_numpy(positions))
        features = work.features.contiguous()
        embedded = self._weights.embedding(torch.from_numpy(work.token_ids))
        tables = torch.from_numpy(work.slabs[:, None])
        rows = PagedRows(torch.from_numpy(counts[0]), torch.from_numpy(lengths[0]), tables, None, None)
        attention = self._kernels.attention_record(rows, self._kv.keys, sizes.heads)
        attention.window, attention.scale, attention.softcap = sizes.window, sizes.head_dim**-0.5, 0.0
        attention.counts, attention.lengths = counts.ctypes.data, lengths.ctypes.data
        drafts = np.full((most, num_sequences), NO_TOKEN, np.int64)
        chances = np.zeros((most, num_sequences), np.float32)
        draw, kept = self._draw(work)
        self._kernels.draft(
            self._eagle,
            records.EagleRound(
                *(tensor.data_ptr() for tensor in (features, embedded, cos, sin)),
                *(array.ctypes.data for array in (slots, counts, lengths, last, drawing)),
                *(ctypes.pointer(attention), ctypes.pointer(draw)),
                *(array.ctypes.data for array in (drafts, chances)),
                *(self._scratch_for(len(features), num_sequences), len(features), num_sequences, most),
            ),
        )
        del kept  # the kernel is done with it
        return np.where(drafts < 0, NO_TOKEN, self._token_ids[drafts]).T

    def _places(self, work: EagleRound, last: Int64, drawing: Int64) -> tuple[Int64, Int64]:
        """Position and slot of the rows of all passes: those to read, then those of each draft's own."""
        firsts = last + 1 - work.num_rows
        within = np.arange(len(work.positions)) - np.repeat(firsts, work.num_rows)
        base = work.slabs.astype(np.int64) * self._kv.num_slots + work.num_kept
        slots = [np.repeat(base, work.num_rows) + within]
        positions = [work.positions]
        for depth, count in enumerate(drawing.tolist()):
            if depth:
                slots.append(base[:count] + work.num_rows[:count] + depth - 1)
                positions.append(work.positions[last[:count]] + depth)
        return np.concatenate(positions), np.concatenate(slots)

    def _draw(self, work: EagleRound) -> tuple[Draw, object]:
        """How the sequences draw, and the memory it points to."""
        sampling, num_sequences = work.sampling, len(work.num_rows)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(sampling.min_p.astype(np.float64))
        columns = (
            np.arange(num_sequences),
            *(sampling.temperature, sampling.top_k, sampling.top_p.astype(np.float64), log_min_p),
        )
        keys = work.keys.transpose(0, 1).contiguous()  # [D, J, 2]
        vocab = _padded(len(self._token_ids))
        is_bf16 = self._kernels.dtype is torch.bfloat16
        addresses = [column.ctypes.data for column in columns]
        draw = Draw(
            *(None, *addresses, keys.data_ptr(), None, num_sequences, vocab, is_bf16, self._names.data_ptr())
        )
        return draw, (columns, keys)

    def _scratch_for(self, num_rows: int, num_sequences: int) -> int:
        """The address of memory for such a round; kept, since touching fresh pages costs more."""
        needed = self._kernels.eagle_scratch(self._eagle, num_rows, num_sequences)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(kept_numbers(needed), dtype=self._scratch.dtype)
        return self._scratch.data_ptr()


def _padded(count: int) -> int:
    return -(-count // PANEL) * PANEL


def _padded_head(head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The head with outputs that fill its last panel, and what makes these impossible."""
    count, hidden = head.shape
    if count % PANEL == 0:
        return head, None
    whole = head.new_zeros((_padded(count), hidden))
    whole[:count] = head
    bias = head.new_zeros(len(whole))
    bias[count:] = -torch.inf
    return whole, bias
