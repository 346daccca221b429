"""Weights of 8-bit floats (E4M3), each with a scale for a span of inputs, as the CPU's kernels take them."""

from __future__ import annotations

import torch

SPAN = 128  # inputs with one scale


def every_float(out: int, width: int) -> torch.Tensor:
    """Codes [out, width] of E4M3: each but the two that are no numbers, again and again."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    count = out * width
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))
    return codes.repeat(-(-count // len(codes)))[:count][order].view(out, width)


def float_numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What they stand for, in float64."""
    spread = scales.repeat_interleave(SPAN, dim=1)[:, : codes.shape[1]]
    return codes.view(torch.float8_e4m3fn).double() * spread.double()
