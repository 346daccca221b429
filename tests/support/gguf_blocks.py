"""Weights as GGUF files store them: random bytes whose scales are numbers."""

from __future__ import annotations

import math

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Format
from gguf import dequantize
from numpy.typing import NDArray

# Of each format, the byte offsets of the half-precision numbers in a block.
SCALES_AT = {
    Format.Q4_0: (0,),
    Format.Q4_1: (0, 2),
    Format.Q5_0: (0,),
    Format.Q5_1: (0, 2),
    Format.Q8_0: (0,),
    Format.Q2_K: (80, 82),
    Format.Q3_K: (108,),
    Format.Q4_K: (0, 2),
    Format.Q5_K: (0, 2),
    Format.Q6_K: (208,),
    Format.IQ4_NL: (0,),
    Format.IQ4_XS: (0,),
    Format.MXFP4: (),
}
# The standard deviation of what comes out of random bytes.
_SPREADS = {
    Format.Q4_0: 0.03,
    Format.Q4_1: 0.06,
    Format.Q5_0: 0.06,
    Format.Q5_1: 0.12,
    Format.Q8_0: 0.45,
    Format.Q2_K: 0.12,
    Format.Q3_K: 0.24,
    Format.Q4_K: 2.2,
    Format.Q5_K: 4.3,
    Format.Q6_K: 8.1,
    Format.IQ4_NL: 0.42,
    Format.IQ4_XS: 7.8,
    Format.MXFP4: 0.012,
}
BLOCK_FORMATS = tuple(SCALES_AT)


def random_blocks(
    kind: Format, out: int, in_features: int, seed: int = 0, spread: float | None = None
) -> NDArray[np.uint8]:
    """Weights [out, in_features] in that format: bytes [out, bytes of a row].

    `spread` is their standard deviation, about; None for whatever comes.
    """
    rng = np.random.default_rng(seed)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (out, in_features // numbers, size), dtype=np.uint8)
    if kind is Format.MXFP4:  # its scales are powers of two, by their exponents
        least = 118 if spread is None else 118 + round(math.log2(spread / _SPREADS[kind]))
        blocks[:, :, 0] = rng.integers(least, least + 3, blocks.shape[:2])
    for at in SCALES_AT[kind]:
        factor = 1.0 if spread is None else spread / _SPREADS[kind]
        scales = factor * rng.uniform(0.001, 0.01, blocks.shape[:2]) * rng.choice((-1, 1), blocks.shape[:2])
        blocks[:, :, at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(out, -1)


def unpacked(kind: Format, stored: NDArray[np.uint8]) -> torch.Tensor:
    """The numbers [out, in_features] in float32, by the `gguf` package."""
    return torch.from_numpy(dequantize(stored, kind))


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """The rows of x as the kernels round them, in float64: 32 numbers have the scale of their largest.

    But for the four inputs with the largest number of a row, which have their own.
    """
    fours = x.float().view(len(x), -1, 4)
    chosen = fours.abs().amax(-1).argmax(-1)  # [rows]
    is_peak = torch.nn.functional.one_hot(chosen, fours.shape[1]).bool()[:, :, None]  # [rows, fours, 1]
    peak, rest = (torch.where(mask, fours, 0.0).view(len(x), -1, 32) for mask in (is_peak, ~is_peak))
    return (_rounded(peak) + _rounded(rest)).view(x.shape)


def _rounded(parts: torch.Tensor) -> torch.Tensor:
    largest = parts.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, parts * (torch.tensor(127.0) / largest), 0.0).round()
    return codes.double() * (largest / 127).double()
