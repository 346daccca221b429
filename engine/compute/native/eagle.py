"""NativeEagle: a drafter's one layer on the kernels, a whole round of all sequences in one call."""

from __future__ import annotations

import ctypes
from array import array
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from gguf import GGMLQuantizationType

from engine.compute.attention import PagedRows
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_round import GUESSES, Chain, EagleRound, Guess
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.native import records
from engine.compute.native.kernels import MAX_HEAD_DIM, PANEL, VECTOR, NativeKernels, NormWeights
from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import Draw
from engine.compute.native.rotation_table import RotationTable
from engine.compute.native.scratch import MAX_GROUP, kept_numbers

_GAP_BLOCK = 64  # as draw.h has it
_DRAWN = (torch.bfloat16, torch.float32)  # what logits may be


class NativeEagle:
    """An EagleCompute; see TorchEagle, whose drafts it makes but for rounding.

    Keeps copies of the weights, and of the embeddings of the tokens that it can guess.
    """

    def __init__(
        self,
        weights: EagleWeights,
        kernels: NativeKernels,
        kv: EagleKv,
        least_chance: float,
        *,
        in_bytes: bool = True,
    ) -> None:
        """With `in_bytes` the weights are rounded to 8 bits: a wrong guess changes no text."""
        sizes = weights.sizes
        self._weights = weights
        self._kernels = kernels
        self._kv = kv
        self._least_chance = least_chance
        self._token_ids = weights.token_ids.numpy()
        self._names = torch.zeros(_padded(len(weights.token_ids)) + _GAP_BLOCK, dtype=torch.int32)
        self._names[: len(weights.token_ids)] = weights.token_ids
        with torch.inference_mode():
            self._embedding = weights.embedding(weights.token_ids).contiguous()
        head, bias = _padded_head(weights.head)
        parts = (weights.fuse, weights.qkv, weights.output, weights.gate_up, weights.down)
        packed = (*map(kernels.pack, parts), kernels.pack(head, bias))
        self._products = [_rounded(kernels, each) if in_bytes else each for each in packed]
        norms = (weights.hidden_norm, weights.input_norm, weights.mlp_norm, weights.last_norm)
        self._eagle = records.Eagle(
            *(NormWeights(norm, weights.eps).record for norm in norms),
            *(product.record for product in self._products),
            *(tensor.data_ptr() for tensor in (self._embedding, kv.keys, kv.values)),
            *(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim),
            *(weights.down.shape[1], weights.norms_residual),
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
    def run(self, work: EagleRound) -> list[Chain]:
        """See EagleCompute."""
        sizes, most, num_sequences = self._weights.sizes, work.most_drafts, len(work.num_rows)
        places = _Places.of(work, self._kv.num_slots)
        cos, sin = self._rotations.rows(torch.tensor(places.positions))
        features = work.features.contiguous()
        embedded = self._weights.embedding(torch.tensor(work.token_ids))
        lengths, slabs = (torch.tensor(part, dtype=torch.int32) for part in (places.lengths, work.slabs))
        one_each = torch.ones(num_sequences, dtype=torch.int32)
        rows = PagedRows(one_each, lengths, slabs[:, None], None, None)
        attention = self._kernels.attention_record(rows, self._kv.keys, sizes.heads)
        attention.window, attention.scale, attention.softcap = sizes.window, sizes.head_dim**-0.5, 0.0
        indices = [array("q", part) for part in (places.slots, places.last, work.drawing, work.num_wanted)]
        num_guesses = most * num_sequences * GUESSES
        guesses, chances = array("q", bytes(8 * num_guesses)), array("f", [-1.0]) * num_guesses
        draw, kept = self._draw(work)
        slots, last, drawing, wanted = map(_address, indices)
        self._kernels.draft(
            self._eagle,
            records.EagleRound(
                *(tensor.data_ptr() for tensor in (features, embedded, cos, sin)),
                *(slots, lengths.data_ptr(), last, drawing),
                *(ctypes.pointer(attention), ctypes.pointer(draw)),
                *(wanted, _address(guesses), _address(chances)),
                *(self._scratch_for(len(features), num_sequences), len(features), num_sequences, most),
                max(self._least_chance, work.least_chance),
            ),
        )
        del kept  # the kernel is done with it
        return [self._chain(guesses, chances, sequence, num_sequences) for sequence in range(num_sequences)]

    def _chain(self, guesses: array[int], chances: array[float], sequence: int, num_sequences: int) -> Chain:
        """One sequence's guesses, which the kernel gives by their places in the embedding."""
        chain: Chain = []
        for first in range(sequence * GUESSES, len(chances), num_sequences * GUESSES):
            if chances[first] < 0:
                break
            own = zip(guesses[first : first + GUESSES], chances[first : first + GUESSES], strict=True)
            chain.append([Guess(int(self._token_ids[at]), chance) for at, chance in own if chance >= 0])
        return chain

    def _draw(self, work: EagleRound) -> tuple[Draw, object]:
        """How the sequences draw, and the memory it points to."""
        num_sequences, vocab = len(work.num_rows), _padded(len(self._token_ids))
        sizes = (num_sequences, vocab, self._kernels.dtype is torch.bfloat16, self._names.data_ptr())
        rows = array("q", range(num_sequences))
        if work.noise is None:
            greedy = array("f", bytes(4 * num_sequences))
            return Draw(None, _address(rows), _address(greedy), *(None,) * 5, *sizes), (rows, greedy)
        sampling = work.noise.sampling
        with np.errstate(divide="ignore"):
            log_min_p = np.log(sampling.min_p.astype(np.float64))
        columns = (sampling.temperature, sampling.top_k, sampling.top_p.astype(np.float64), log_min_p)
        keys = work.noise.keys.transpose(0, 1).contiguous()  # [D, J, 2]
        addresses = [column.ctypes.data for column in columns]
        return Draw(None, _address(rows), *addresses, keys.data_ptr(), None, *sizes), (rows, columns, keys)

    def _scratch_for(self, num_rows: int, num_sequences: int) -> int:
        """The address of memory for such a round; kept, since touching fresh pages costs more."""
        needed = self._kernels.eagle_scratch(self._eagle, num_rows, num_sequences)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(kept_numbers(needed), dtype=self._scratch.dtype)
        return self._scratch.data_ptr()


class _Places(NamedTuple):
    """Where the rows of all passes of a round lie: those to read, then those of each draft's own."""

    positions: list[int]  # [rows of all passes]
    slots: list[int]  # the same
    last: list[int]  # [J] the last row that each sequence reads
    lengths: list[int]  # of what the sequences' newest rows attend to, pass by pass

    @classmethod
    def of(cls, work: EagleRound, num_slots: int) -> Self:
        """Of slabs with `num_slots` slots each."""
        spans = list(zip(work.slabs, work.num_kept, work.num_rows, strict=True))
        last = [stop - 1 for stop in accumulate(work.num_rows)]
        positions = list(work.positions)
        slots = [slab * num_slots + kept + row for slab, kept, rows in spans for row in range(rows)]
        ends = [slots[row] for row in last]
        lengths = [kept + rows for _, kept, rows in spans]
        for depth, count in enumerate(work.drawing[1:], 1):
            positions += [work.positions[row] + depth for row in last[:count]]
            slots += [end + depth for end in ends[:count]]
            lengths += [length + depth for length in lengths[: len(spans)]]
        return cls(positions, slots, last, lengths)


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def _rounded(kernels: NativeKernels, weights: PackedWeights) -> PackedWeights:
    """The weights in 8 bits where a kernel takes them so: a round reads all of them for a few rows."""
    block_format = GGMLQuantizationType.Q8_0
    is_taken = kernels.packs_format(block_format, weights.in_features)
    return kernels.quantize(weights, block_format) if is_taken else weights


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
