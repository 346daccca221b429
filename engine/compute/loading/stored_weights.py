"""Weights as a GGUF file stores them, and modules that unpack them for each use: exact, and slow.

They stand in a model until compiled kernels take the weights over; where these cannot be had, they stay.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import nn


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
