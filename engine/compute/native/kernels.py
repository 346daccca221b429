"""NativeKernels: kernels.cpp with tensors for arguments. What is wrong for a kernel is refused here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from engine.compute.attention import LayerCall, PagedRows
from engine.compute.attention.huge_pages import HugePages
from engine.compute.attention.kv_rows import SCALE_BYTES
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.native.block_panels import F8_E4M3, PLAIN, BlockPanels, joined
from engine.compute.native.forms import NativeUnavailable
from engine.compute.native.packed_weights import PackedWeights
from engine.compute.native.records import (
    ELEMENTS,
    INDEX,
    POINTER,
    Activation,
    Attention,
    ChosenExperts,
    Decoder,
    DecoderStep,
    Eagle,
    EagleRound,
    Experts,
    Heads,
    Mixture,
    Norm,
    NormKind,
    Product,
    Rotation,
    Router,
    Routes,
)
from engine.compute.native.scratch import MAX_GROUP, record_numbers
from engine.compute.native.team import ComputeTeam, library_function, load_library

PANEL = 32  # columns of packed weights that lie together
VECTOR = 16
MAX_HEAD_DIM = 512
MAX_ATTENDED_DIM = 1024  # where nothing of heads is rotated or normed by kernels
_REGION_BYTES = 64 << 20  # of huge pages for weights, of which the last one is half empty
_SMALL_BYTES = 1 << 18  # of a tiny model's weights, which are not worth a page


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm of rows: `weight` and, of a centred one that has it, `bias` are [width]."""

    weight: torch.Tensor
    eps: float
    kind: NormKind = NormKind.ROUNDED
    bias: torch.Tensor | None = None

    @property
    def record(self) -> Norm:
        """The norm as the kernels take it, for as long as its tensors are there."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Norm(self.weight.data_ptr(), self.eps, self.kind, bias)


NO_NORM = Norm(None, 0.0, NormKind.ROUNDED, None)


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How queries, keys and values are normed and which are rotated; by default as Llama's.

    Norms are of single heads, [dim], or with `norms_rows` those of queries and keys of all of a token.
    `in_pairs` rotates neighbours together and not the halves of a head. `at_once` rounds a rotated number
    once, not its products as well. `kv_parts` is what is projected beside queries: keys and values; 1 for
    keys alone, which as they are before their norm are the values, too; or nothing where keys and values are
    those of another layer, which has written them.
    """

    query_norm: NormWeights | None = None
    key_norm: NormWeights | None = None
    value_norm: NormWeights | None = None
    norms_rows: bool = False
    in_pairs: bool = False
    at_once: bool = False
    kv_parts: int = 2

    def record(self, heads: int, kv_heads: int, dim: int, rotary: int) -> Heads:
        """The same for heads of `dim`, of which the first `rotary` numbers are rotated."""
        kv_heads = kv_heads if self.kv_parts else 0
        flags = self.in_pairs, self.at_once, self.norms_rows, self.kv_parts == 1
        return Heads(heads, kv_heads, dim, rotary, *flags)

    @property
    def norm_records(self) -> tuple[Norm, Norm, Norm]:
        """Those of queries, keys and values."""
        return norm_record(self.query_norm), norm_record(self.key_norm), norm_record(self.value_norm)


class NativeKernels:
    """The loaded library. Every tensor is of `dtype` and contiguous on the CPU; results are new tensors.

    With `has_formats` it takes weights in blocks of every format, else of Q8_0, and K/V in int8.
    Computes with the threads of `team`: as many as torch has on the calling thread, until it is resized.
    Raises NativeUnavailable if the library cannot be loaded.
    """

    def __init__(self, library: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._library = loaded = load_library(library)
        self.dtype = dtype
        self.team = ComputeTeam(loaded, torch.get_num_threads())
        self._records = torch.empty(0)
        # Elements apart from blocks: where these are made of those, whole regions of elements are given back.
        self._for_elements, self._for_blocks = HugePages(_REGION_BYTES), HugePages(_REGION_BYTES)

        function = self.function
        self._pack = function("slip_pack", POINTER, POINTER, INDEX, INDEX)
        self._quantize = function("slip_quantize", INDEX, POINTER, POINTER, INDEX, INDEX)
        self._linear = function("slip_linear", ctypes.POINTER(Product), POINTER, POINTER, INDEX)
        self._pack_blocks = function("slip_pack_blocks", INDEX, *[POINTER] * 3, INDEX, INDEX)
        self._pack_floats = function("slip_pack_floats", *[POINTER] * 3, INDEX, INDEX)
        self._panel_bytes = library_function(loaded, "slip_panel_bytes", INDEX, INDEX, result=INDEX)
        self.has_formats = bool(self._panel_bytes(GGMLQuantizationType.Q4_0, MAX_HEAD_DIM))
        self._read_rows = function("slip_read_rows", ctypes.POINTER(Product), POINTER, POINTER, INDEX)
        self._normalize = function("slip_normalize", POINTER, ctypes.POINTER(Norm), POINTER, INDEX, INDEX)
        self._activate = function("slip_activate", POINTER, POINTER, *[INDEX] * 4)
        self._experts = function("slip_experts", ctypes.POINTER(Experts), ctypes.POINTER(ChosenExperts))
        self._route = function("slip_route", ctypes.POINTER(Router), ctypes.POINTER(Routes))
        self._mixture = function("slip_mixture", ctypes.POINTER(Mixture), *[POINTER] * 3, INDEX)
        self._mixture_scratch = library_function(
            loaded, "slip_mixture_scratch", ctypes.POINTER(Mixture), result=INDEX
        )
        self._rotate = function("slip_rotate_and_write", ctypes.POINTER(Rotation))
        self._attend = function("slip_attend", ctypes.POINTER(Attention))
        step = POINTER, ctypes.POINTER(Decoder), ctypes.POINTER(DecoderStep)
        self._decode = library_function(loaded, "slip_decode", *step, result=INDEX)
        self._decoder_scratch = library_function(
            loaded, "slip_decoder_scratch", ctypes.POINTER(Decoder), result=INDEX
        )
        self._draft = function("slip_eagle", ctypes.POINTER(Eagle), ctypes.POINTER(EagleRound))
        self._eagle_scratch = library_function(
            loaded, "slip_eagle_scratch", ctypes.POINTER(Eagle), INDEX, INDEX, result=INDEX
        )

    def function(self, name: str, *arguments: Any) -> Any:
        """One of the library's that is given a team's handle first, and nothing is given back by."""
        return library_function(self._library, name, POINTER, *arguments)

    @staticmethod
    def packs(weight: torch.Tensor, dtype: torch.dtype) -> bool:
        """True for weights [out, in] that `pack` takes for a model in `dtype`."""
        return weight.dtype is dtype and weight.shape[0] % PANEL == 0 and weight.shape[1] % 2 == 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeights:
        """Weights [out, in] in the order that `linear` reads them in, as many numbers; `bias` is [out]."""
        weight = weight.contiguous()
        packed = _memory_for(weight.shape, weight.dtype, self._for_elements)
        self._pack(self.team.handle, weight.data_ptr(), packed.data_ptr(), *weight.shape)
        return PackedWeights(ELEMENTS, packed, bias, *weight.shape)

    def quantize(self, weights: PackedWeights, block_format: int) -> PackedWeights:
        """The same weights, which `pack` gave, rounded to Q8_0 or Q4_1 (ggml's numbers).

        Each 32 inputs of an output have a scale, that with the least error. For a multiple of 32 inputs.
        """
        out, in_features = weights.out, weights.in_features
        shape = out // PANEL, self._panel_bytes(block_format, in_features)
        panels = _memory_for(shape, torch.uint8, self._for_blocks)
        addresses = (weights.packed.data_ptr(), panels.data_ptr())
        self._quantize(self.team.handle, block_format, *addresses, out, in_features)
        return joined([BlockPanels(block_format, panels, out, in_features)], weights.bias)

    def packs_format(self, block_format: int, in_features: int) -> bool:
        """True for weights [out, in_features] that `pack_blocks` takes, by ggml's number of their format."""
        return bool(self._panel_bytes(block_format, in_features))

    def pack_blocks(
        self,
        block_format: int,
        stored: NDArray[np.uint8],
        in_features: int,
        order: NDArray[np.int64] | None = None,
    ) -> BlockPanels:
        """Weights as a GGUF file stores them, bytes [out, bytes of a row], in panels.

        `order`, int64 [out], names the stored row of each output; None keeps theirs.
        """
        out = len(stored) if order is None else len(order)
        shape = -(-out // PANEL), self._panel_bytes(block_format, in_features)
        panels = _memory_for(shape, torch.uint8, self._for_blocks)
        rows = None if order is None else order.ctypes.data
        addresses = (stored.ctypes.data, rows, panels.data_ptr())
        self._pack_blocks(self.team.handle, block_format, *addresses, out, in_features)
        return BlockPanels(block_format, panels, out, in_features)

    def pack_floats(self, codes: torch.Tensor, scales: torch.Tensor) -> BlockPanels:
        """Weights of 8-bit floats (E4M3) in panels: `codes` [out, in], an even number of inputs, none NaN.

        `scales` is float32 [out, spans], what they are multiplied with by 128 inputs.
        """
        out, in_features = codes.shape
        codes, scales = codes.contiguous(), scales.contiguous()
        shape = -(-out // PANEL), self._panel_bytes(F8_E4M3, in_features)
        panels = _memory_for(shape, torch.uint8, self._for_blocks)
        addresses = (codes.data_ptr(), scales.data_ptr(), panels.data_ptr())
        self._pack_floats(self.team.handle, *addresses, out, in_features)
        return BlockPanels(F8_E4M3, panels, out, in_features)

    def pack_plain(self, weight: torch.Tensor) -> BlockPanels:
        """Weights [out, in] that `packs` allows, as panels of elements."""
        packed = self.pack(weight)
        panels = packed.packed.view(packed.out // PANEL, -1)
        return BlockPanels(PLAIN, panels, packed.out, packed.in_features)

    def read_rows(self, weights: PackedWeights, outputs: torch.Tensor) -> torch.Tensor:
        """The weights of `outputs`, int64 [n], unpacked: [n, in]. For weights of blocks alone."""
        outputs = outputs.contiguous()
        y = torch.empty(len(outputs), weights.in_features, dtype=self.dtype)
        self._read_rows(self.team.handle, weights.record, outputs.data_ptr(), y.data_ptr(), len(outputs))
        return y

    def linear(self, x: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
        """x [n, in] times the weights, plus their bias: [n, out]."""
        y = x.new_empty(x.shape[0], weights.out)
        if len(x):  # a step that only computes part of a prompt wants no logits
            self._linear(self.team.handle, weights.record, x.data_ptr(), y.data_ptr(), x.shape[0])
        return y

    def normalize(self, x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        """Each row of x [n, width], normed; width a multiple of 16."""
        y = torch.empty_like(x)
        self._normalize(self.team.handle, x.data_ptr(), norm.record, y.data_ptr(), *x.shape)
        return y

    def activate(self, x: torch.Tensor, activation: Activation, *, is_gated: bool = True) -> torch.Tensor:
        """activation(gate) * up of x [n, 2 * width], gate before up: [n, width]; width a multiple of 16.

        What is not gated is x [n, width], and the result its activation; SWIGLU_LIMITED always is.
        """
        n, width = x.shape[0], x.shape[1] // (2 if is_gated else 1)
        y = x.new_empty(n, width)
        self._activate(self.team.handle, x.data_ptr(), y.data_ptr(), n, width, activation, is_gated)
        return y

    def compute_experts(
        self, x: torch.Tensor, experts: Experts, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Each row of x [n, hidden] through its experts, their outputs times their shares summed: the same.

        `chosen`, int64 [n, each], are numbers of experts, and `shares` float32 like it; a number that none
        has is left out. A row's result depends on that row alone. Hidden and the width of an expert are
        multiples of PANEL.
        """
        y = torch.empty_like(x)
        num_choices = chosen.numel()
        scratch = x.new_empty(num_choices, experts.gate_up.k + experts.down.k)
        given = (tensor.data_ptr() for tensor in (x, chosen, shares, y, scratch))
        self._experts(self.team.handle, experts, ChosenExperts(*given, *chosen.shape))
        return y

    def route(self, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of rows x [n, hidden] the logits [n, experts], and numbers and float32 shares of those chosen.

        These are [n, each], int64 and float32, the likeliest first.
        """
        n = len(x)
        logits = x.new_empty(n, router.weights.out)
        chosen = torch.empty(n, router.each, dtype=torch.int64)
        shares = torch.empty(n, router.each)
        given = (tensor.data_ptr() for tensor in (x, logits, chosen, shares))
        self._route(self.team.handle, router, Routes(*given, n))
        return logits[:, : router.count], chosen, shares

    def compute_mixture(self, x: torch.Tensor, mixture: Mixture) -> torch.Tensor:
        """Each row of x [n, hidden] through the experts that the mixture's router chooses: the same."""
        y = torch.empty_like(x)
        scratch = x.new_empty(len(x), self._mixture_scratch(mixture))
        given = (tensor.data_ptr() for tensor in (x, y, scratch))
        self._mixture(self.team.handle, mixture, *given, len(x))
        return y

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        form: HeadForm,
        pages: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Norm, rotate, put keys and values into their pages; the queries [n, heads, dim].

        `qkv` is [n, (heads + form.kv_parts * kv_heads) * dim]; its contents are lost. `rotation` is cos and
        sin [n, rotary] of any type, those of the second half behind the first's: so many numbers of each head
        are rotated, none where it is None. `pages` are a layer's keys and values as KvTensors has them,
        `slots` int64 [n]; dim and rotary are multiples of 32, dim at most MAX_HEAD_DIM.
        """
        keys, values = pages
        _, kv_heads, block_size, _ = keys.shape
        dim = head_dim(keys)
        n, heads = qkv.shape[0], qkv.shape[1] // dim - form.kv_parts * kv_heads
        query = qkv.new_empty(n, heads, dim)
        query_norm, key_norm, value_norm = form.norm_records
        angles = [part.float().contiguous() for part in rotation or ()]
        rotary = angles[0].shape[1] if angles else 0
        self._rotate(
            self.team.handle,
            Rotation(
                form.record(heads, kv_heads, dim, rotary),
                qkv.data_ptr(),
                *([part.data_ptr() for part in angles] or (None, None)),
                *(query_norm, key_norm),
                *(tensor.data_ptr() for tensor in (query, keys, values, slots)),
                *(n, block_size, keys.dtype is torch.int8),
                value_norm,
            ),
        )
        return query

    def attend(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        rows: PagedRows,
        call: LayerCall,
    ) -> torch.Tensor:
        """See RowAttention."""
        keys, values = pages
        asked, query = query, query.to(self.dtype).contiguous()
        output = torch.empty_like(query)
        record = self.attention_record(rows, keys, query.shape[1])
        record.query, record.keys, record.values = query.data_ptr(), keys.data_ptr(), values.data_ptr()
        record.output = output.data_ptr()
        record.window, record.chunk = call.window or 0, call.chunk or 0
        record.scale, record.softcap = call.scaling, call.softcap or 0.0
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        record.sinks = None if sinks is None else sinks.data_ptr()
        self._attend(self.team.handle, record)
        return output.to(asked.dtype)

    def attention_record(self, rows: PagedRows, pages: torch.Tensor, heads: int) -> Attention:
        """What of a step's attention is the same in all layers of `heads` and of `pages` like these.

        Queries, keys, values, output and sinks, window, chunk, scale and soft cap are still to be filled in.
        Layers with fewer heads, or smaller ones, may put in their own.
        Raises NativeUnavailable where there is no memory to attend with.
        """
        of_bytes = pages.dtype is torch.int8
        if of_bytes and not self.has_formats:
            raise NativeUnavailable("the kernels do not attend to K/V in int8")
        _, kv_heads, block_size, _ = pages.shape
        dim = head_dim(pages)
        given = (rows.counts, rows.lengths, rows.tables, rows.trees, rows.gaps)
        record = Attention(
            *(None, None, None),
            *(None if tensor is None else tensor.data_ptr() for tensor in given),
            *(None, None, None),
            *(len(rows.counts), rows.tables.shape[1], heads, kv_heads, dim, block_size),
        )
        record.room = record_numbers(dim, self.team.size)
        if record.room:
            record.kept = self._record_room(record.room)  # a later record, of another thread, may need more
            record.records = record.kept.data_ptr()
        record.of_bytes = of_bytes
        return record

    def _record_room(self, needed: int) -> torch.Tensor:
        """Where so many numbers of records of chunks fit; kept, as large as it ever must be.

        Only who has the team's threads uses it.
        """
        records = self._records
        if records.numel() < needed:
            try:
                records = self._records = torch.empty(needed)
            except RuntimeError:
                size = needed * records.itemsize
                raise NativeUnavailable(f"there are no {size} bytes for the scratch of attention") from None
        return records

    def decoder_scratch(self, decoder: Decoder) -> int:
        """How many numbers of scratch `decode` needs for each token."""
        return int(self._decoder_scratch(decoder))

    def decode(self, decoder: Decoder, step: DecoderStep) -> None:
        """Run `decoder` on a step's tokens; see decoder.h. Raises IndexError for one that there is not."""
        place = self._decode(self.team.handle, decoder, step)
        if place >= 0:
            raise IndexError(f"token {place} of the step is none of the model's {decoder.num_tokens}")

    def eagle_scratch(self, eagle: Eagle, num_rows: int, num_sequences: int) -> int:
        """How many numbers of scratch `draft` needs for so many."""
        return int(self._eagle_scratch(eagle, num_rows, num_sequences))

    def draft(self, eagle: Eagle, work: EagleRound) -> None:
        """Read rows and draw chains with a drafter's one layer; see eagle.h."""
        self._draft(self.team.handle, eagle, work)


def _memory_for(shape: Sequence[int], dtype: torch.dtype, pages: HugePages) -> torch.Tensor:
    """Weights yet to be written: each step reads all of them, so they lie in huge `pages`."""
    if prod(shape) * dtype.itemsize < _SMALL_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return pages.zeros(shape, dtype)


def norm_record(norm: NormWeights | None) -> Norm:
    """A norm as the kernels take it; None for no norm."""
    return NO_NORM if norm is None else norm.record


def can_attend(layer: LayerKv, num_heads: int) -> bool:
    """Whether `attend` knows keys and values such as a layer of so many query heads keeps."""
    dim, num_kv_heads = layer.key_dim, layer.num_kv_heads
    return (
        (dim == layer.value_dim or layer.value_in_key)
        and 0 < dim <= MAX_ATTENDED_DIM
        and dim % PANEL == 0
        and not layer.biased
        and num_heads % num_kv_heads == 0
        and num_heads <= MAX_GROUP * num_kv_heads
    )


def head_dim(pages: torch.Tensor) -> int:
    """How many numbers a head has whose keys or values are in pages like these."""
    return pages.shape[-1] - (SCALE_BYTES if pages.dtype is torch.int8 else 0)
