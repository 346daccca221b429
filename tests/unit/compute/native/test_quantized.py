"""Weights rounded to 8 or 4 bits as a model is loaded: the nearest that 32 numbers with one scale can be."""

from __future__ import annotations

import pytest
import torch

from engine.compute.native.block_panels import joined
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.quantization import Q4_1, Q8_0
from tests.support.gguf_blocks import in_blocks
from tests.support.native import compiled_kernels

SHAPES = ((32, 32), (96, 64), (576, 96))


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels(formats=True)


@pytest.fixture(autouse=True)
def threads(kernels: NativeKernels) -> None:
    kernels.team.resize(2)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(kernels: NativeKernels, weight: torch.Tensor, block_format: int) -> torch.Tensor:
    """What becomes of `weight` [out, in]."""
    packed = kernels.quantize(kernels.pack(weight), block_format)
    return kernels.read_rows(packed, torch.arange(len(weight))).float()


def groups(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().view(len(weight), -1, 32)


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_eight_bits_are_multiples_of_a_127th_of_the_largest(
    kernels: NativeKernels, width: int, out: int
) -> None:
    weight = noise(out, width) * torch.logspace(-2, 2, out).bfloat16()[:, None]
    weight[3] = 0
    found, exact = groups(rounded(kernels, weight, Q8_0)), groups(weight)
    step = (exact.abs().amax(-1, keepdim=True) / 127).half().float()
    assert ((found - exact).abs() <= 0.51 * step + 2**-8 * exact.abs()).all()
    assert not found[3].any()


@pytest.mark.parametrize(("block_format", "codes"), ((Q8_0, 127), (Q4_1, 15)))
def test_very_small_weights_are_not_cut_off(kernels: NativeKernels, block_format: int, codes: int) -> None:
    """Near such scales there are few half-precision numbers, 6e-8 apart."""
    weight = noise(64, 96) * torch.logspace(-6, -4, 64).bfloat16()[:, None]
    found, exact = groups(rounded(kernels, weight, block_format)), groups(weight)
    step = (exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)) / codes
    assert ((found - exact).abs() <= 0.75 * step + 1e-7 + 2**-8 * exact.abs()).all()


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_four_bits_err_less_than_the_whole_range_does(kernels: NativeKernels, width: int, out: int) -> None:
    weight = noise(out, width)
    exact = groups(weight)
    low, high = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
    plain = ((exact - low) / (high - low) * 15).round() * (high - low) / 15 + low
    found = groups(rounded(kernels, weight, Q4_1))
    worst = 1 + 2**-5  # what is read is rounded to bfloat16
    errors, plain_errors = ((each - exact).square().sum(-1) for each in (found, plain))
    assert (errors <= worst * plain_errors + 1e-4).all()
    assert errors.sum() < 0.9 * plain_errors.sum()


def test_what_had_four_bits_keeps_them(kernels: NativeKernels) -> None:
    """As the default model's weights, which come from such a file."""
    codes = torch.randint(0, 16, (64, 8, 32), generator=torch.Generator().manual_seed(1))
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    weight = ((codes * 0.013 - 0.11).view(64, 256)).bfloat16()
    found = rounded(kernels, weight, Q4_1)
    assert (found - weight.float()).norm() <= 2**-8 * weight.float().norm()


@pytest.mark.parametrize("block_format", (Q4_1, Q8_0))
def test_products_are_of_the_rounded_weights(kernels: NativeKernels, block_format: int) -> None:
    weight, bias, x = noise(96, 576), noise(96, seed=3), noise(97, 576, seed=2)
    packed = kernels.quantize(kernels.pack(weight, bias), block_format)
    whole = kernels.linear(x, packed)
    expected = in_blocks(x) @ rounded(kernels, weight, block_format).double().T + bias.double()
    assert (whole.double() - expected).norm() <= 0.005 * expected.norm()
    for n in (1, 2, 3, 32, 96):
        assert torch.equal(kernels.linear(x[1 : 1 + n].contiguous(), packed), whole[1 : 1 + n])


def test_the_bytes_that_are_read(kernels: NativeKernels) -> None:
    plain = kernels.pack(noise(96, 576), noise(96))
    for block_format, bits in ((Q4_1, 5), (Q8_0, 8.5)):
        small = kernels.quantize(plain, block_format)
        assert small.bias is plain.bias
        assert 8 * sum(part.panels.nbytes for part in small.parts) == bits * 96 * 576
        assert small.out == joined(small.parts).out
