"""Weights as files store them, and modules that unpack them for each use: exact, and slow.

They stand in a model until compiled kernels take the weights over; where these cannot be had, they stay.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import nn

from engine.compute.native.families import weights_of_experts

_PLAIN = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss's gates, as rows.h has them
FLOAT_SPAN = 128  # inputs that have one scale in the kernels' panels of 8-bit floats


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Weights [out, in_features], still in the file: `blocks` is bytes [stored rows, bytes of a row].

    `order` names the stored row of each output; None keeps theirs.
    """

    format: GGMLQuantizationType
    blocks: NDArray[np.uint8]
    out: int
    in_features: int
    order: NDArray[np.int64] | None = None

    @property
    def name(self) -> str:
        """The format's, as files call it."""
        return str(self.format.name)

    @property
    def place(self) -> int:
        """The address of what is stored."""
        return self.blocks.ctypes.data

    @property
    def nbytes(self) -> int:
        """What is stored takes."""
        return self.blocks.nbytes

    @property
    def is_blocks(self) -> bool:
        """False for plain numbers of 16 or 32 bits."""
        return self.format not in _PLAIN

    def numbers(self, outputs: NDArray[np.int64] | slice = slice(None)) -> torch.Tensor:
        """The weights of some outputs in float32: [outputs, in_features]."""
        rows = outputs if self.order is None else self.order[outputs]
        return torch.from_numpy(dequantize(self.blocks[rows], self.format))

    def leave_memory(self) -> None:
        """Give back the pages of the file that were read; they are read again when needed."""
        whole: object = self.blocks
        last = self.blocks
        while isinstance(whole, np.ndarray):
            last, whole = whole, whole.base
        if not isinstance(whole, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = self.blocks.ctypes.data - last.ctypes.data
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (first + self.blocks.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            whole.madvise(mmap.MADV_DONTNEED, begin, size)


@dataclass(frozen=True, slots=True)
class StoredFloats:
    """Weights [out, in_features] of 8-bit floats, `codes` (E4M3, none NaN), as a safetensors file has them.

    `scales`, float32 [out, spans], are what they are multiplied with by 128 inputs.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    name: str = "F8_E4M3"

    @property
    def out(self) -> int:
        """Outputs."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.codes.shape[1]

    @property
    def place(self) -> int:
        """See StoredWeight."""
        return self.codes.data_ptr()

    @property
    def nbytes(self) -> int:
        """See StoredWeight."""
        return self.codes.nbytes

    def numbers(self, outputs: NDArray[np.int64] | slice = slice(None)) -> torch.Tensor:
        """See StoredWeight."""
        codes = self.codes[outputs].float()
        return codes * self.scales[outputs].repeat_interleave(FLOAT_SPAN, dim=1)[:, : codes.shape[1]]


@dataclass(frozen=True, slots=True)
class StoredMxfp4:
    """Weights [out, in_features] as MXFP4 in a safetensors file.

    `codes` is uint8 [..., in_features / 32, 16], of which each byte has two neighbours, the low bits first,
    and `exponents` uint8 [..., in_features / 32]; what is in front of these is all outputs, in order.
    """

    codes: torch.Tensor
    exponents: torch.Tensor
    name: str = "MXFP4"

    @property
    def out(self) -> int:
        """Outputs."""
        return self.exponents.numel() // self.exponents.shape[-1]

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.exponents.shape[-1] * 32

    @property
    def place(self) -> int:
        """See StoredWeight."""
        return self.codes.data_ptr()

    @property
    def nbytes(self) -> int:
        """See StoredWeight."""
        return self.codes.nbytes + self.exponents.nbytes

    def as_blocks(self, outputs: NDArray[np.int64] | slice = slice(None)) -> StoredWeight:
        """Some outputs as a GGUF file has them: a copy."""
        exponents = self.exponents.flatten(0, -2)[outputs]
        codes = self.codes.flatten(0, -3)[outputs]
        apart = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [outputs, blocks, 32]
        blocks = torch.cat((exponents[..., None], apart[..., :16] | apart[..., 16:] << 4), dim=-1)
        out = len(exponents)
        rows = blocks.reshape(out, -1).numpy()
        return StoredWeight(GGMLQuantizationType.MXFP4, rows, out, self.in_features)

    def numbers(self, outputs: NDArray[np.int64] | slice = slice(None)) -> torch.Tensor:
        """See StoredWeight."""
        return self.as_blocks(outputs).numbers()


Stored: TypeAlias = StoredWeight | StoredFloats | StoredMxfp4


class StoredLinear(nn.Module):
    """A projection with stored weights, computed in float32."""

    def __init__(self, stored: Stored, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.stored = stored
        self.in_features, self.out_features = stored.in_features, stored.out
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.stored.numbers(), bias).to(x.dtype)


class StoredEmbedding(nn.Module):
    """An embedding whose rows are unpacked as they are read; the model multiplies them with `scale`."""

    def __init__(self, stored: StoredWeight, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__()
        self.stored = stored
        self.dtype = dtype
        self.scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., hidden]."""
        rows = self.stored.numbers(token_ids.flatten().numpy()).to(self.dtype).view(*token_ids.shape, -1)
        return rows if self.scale is None else rows * torch.tensor(self.scale).to(self.dtype)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, [width, hidden] gates and ups and [hidden, width] downs of `count` of them.

    Each of the three holds one expert's outputs behind the other's, in one piece or several; without gates
    there is no piece of these. `biases` are added: [count, 2 * width] with each gate's before its up's, and
    [count, hidden]; None for none.
    """

    count: int
    gate: Sequence[Stored]
    up: Sequence[Stored]
    down: Sequence[Stored]
    biases: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, kw_only=True)

    @property
    def hidden(self) -> int:
        """What goes in, and comes out."""
        return self.up[0].in_features

    @property
    def width(self) -> int:
        """Of what goes down."""
        return self.down[0].in_features

    @property
    def pieces(self) -> tuple[Stored, ...]:
        """All of them."""
        return (*self.gate, *self.up, *self.down)

    def fits(self, experts: Any) -> bool:
        """True for the weights of experts that were read, which keep theirs in two tensors."""
        count, hidden, width = self.count, self.hidden, self.width
        first = [self.gate, self.up] if self.gate else [self.up]
        outs = [sum(piece.out for piece in pieces) for pieces in (*first, self.down)]
        widths = [{piece.in_features for piece in pieces} for pieces in (*first, self.down)]
        shapes = [tuple(weights.shape) for weights in weights_of_experts(experts)]
        return (
            outs == [*(count * width for _ in first), count * hidden]
            and widths == [*({hidden} for _ in first), {width}]
            and shapes == [(count, len(first) * width, hidden), (count, hidden, width)]
        )


class StoredExperts(nn.Module):
    """The experts of a layer with stored weights, computed in float32, one after the other.

    Called as transformers' are: rows [N, hidden], those that each row goes through and their shares, both
    [N, each]; a number that no expert has is left out. Of gpt-oss's, which have biases and limits, `act_fn`
    is None.
    """

    def __init__(self, stored: ExpertWeights, act_fn: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.stored = stored
        self.act_fn = act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[N, hidden] to the same."""
        stored = self.stored
        summed = torch.zeros(hidden_states.shape)
        for expert in set(top_k_index.flatten().tolist()):
            if not 0 <= expert < stored.count:
                continue
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            x = hidden_states[rows].float()
            y = self._activated(x, expert) @ _of_expert(stored.down, expert, stored.hidden).T
            if stored.biases is not None:
                y = y + stored.biases[1][expert].float()
            summed.index_add_(0, rows, y * top_k_weights[rows, places, None].float())
        return summed.to(hidden_states.dtype)

    def _activated(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        up = x @ _of_expert(self.stored.up, expert, self.stored.width).T
        if not self.stored.gate:
            assert self.act_fn is not None, "only experts with gates have limits"
            return self.act_fn(up)
        gate = x @ _of_expert(self.stored.gate, expert, self.stored.width).T
        if self.stored.biases is not None:
            of_gate, of_up = self.stored.biases[0][expert].float().chunk(2)
            gate, up = gate + of_gate, up + of_up
        if self.act_fn is not None:
            return self.act_fn(gate) * up
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(gate * ALPHA) * (up.clamp(-LIMIT, LIMIT) + 1)


def _of_expert(pieces: Sequence[Stored], expert: int, outputs: int) -> torch.Tensor:
    """The weights of one of several experts with so many outputs each, in float32."""
    first = expert * outputs
    for piece in pieces:
        if first < piece.out:
            return piece.numbers(slice(first, first + outputs))
        first -= piece.out
    raise IndexError(expert)
