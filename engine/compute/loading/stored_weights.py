"""Weights as a GGUF file stores them, and modules that unpack them for each use: exact, and slow.

They stand in a model until compiled kernels take the weights over; where these cannot be had, they stay.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import nn

_PLAIN = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


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


class StoredLinear(nn.Module):
    """A projection with stored weights, computed in float32."""

    def __init__(self, stored: StoredWeight, bias: torch.Tensor | None) -> None:
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

    Each of the three holds one expert's outputs behind the other's, in one piece or several.
    """

    count: int
    gate: Sequence[StoredWeight]
    up: Sequence[StoredWeight]
    down: Sequence[StoredWeight]

    @property
    def hidden(self) -> int:
        """What goes in, and comes out."""
        return self.gate[0].in_features

    @property
    def width(self) -> int:
        """Of a gate."""
        return self.down[0].in_features

    @property
    def pieces(self) -> tuple[StoredWeight, ...]:
        """All of them."""
        return (*self.gate, *self.up, *self.down)

    def fits(self, experts: Any) -> bool:
        """True for the weights of experts that keep theirs in two tensors, of each the gate before the up."""
        outs = [sum(piece.out for piece in pieces) for pieces in (self.gate, self.up, self.down)]
        widths = [{piece.in_features for piece in pieces} for pieces in (self.gate, self.up, self.down)]
        count, hidden, width = self.count, self.hidden, self.width
        return (
            outs == [count * width, count * width, count * hidden]
            and widths == [{hidden}, {hidden}, {width}]
            and tuple(experts.gate_up_proj.shape) == (count, 2 * width, hidden)
            and tuple(experts.down_proj.shape) == (count, hidden, width)
        )


class StoredExperts(nn.Module):
    """The experts of a layer with stored weights, computed in float32, one after the other.

    Called as transformers' are: rows [N, hidden], those that each row goes through and their shares, both
    [N, each]; a number that no expert has is left out.
    """

    def __init__(self, stored: ExpertWeights, act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
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
            act = self.act_fn(x @ _of_expert(stored.gate, expert, stored.width).T)
            act = act * (x @ _of_expert(stored.up, expert, stored.width).T)
            y = act @ _of_expert(stored.down, expert, stored.hidden).T
            summed.index_add_(0, rows, y * top_k_weights[rows, places, None].float())
        return summed.to(hidden_states.dtype)


def _of_expert(pieces: Sequence[StoredWeight], expert: int, outputs: int) -> torch.Tensor:
    """The weights of one of several experts with so many outputs each, in float32."""
    first = expert * outputs
    for piece in pieces:
        if first < piece.out:
            return piece.numbers(slice(first, first + outputs))
        first -= piece.out
    raise IndexError(expert)
