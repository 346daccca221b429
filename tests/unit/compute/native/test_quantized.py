"""Products with 8-bit weights: those of integers times a scale, whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from engine.compute.native.kernels import NativeKernels
from engine.compute.native.packed_weights import PackedWeights
from tests.support.native import compiled_kernels

ROWS = (1, 2, 11, 12, 13, 24, 95, 96, 97, 200)  # around one tile, one block, and more
SHAPES = ((2, 32), (34, 64), (576, 96), (1536, 32))


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels()


@pytest.fixture(autouse=True)
def threads(kernels: NativeKernels) -> None:
    kernels.team.resize(2)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def integers(*shape: int, limit: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(
    kernels: NativeKernels, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> PackedWeights:
    return kernels.quantize(kernels.pack(weight, bias))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What int8 makes of `weight` [out, in], in float32."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    integers = (weight.float() * (torch.tensor(127.0) / largest)).round()
    return torch.where(largest > 0, integers * (largest / 127), 0.0)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_integers_are_multiplied_exactly(kernels: NativeKernels, n: int, width: int, out: int) -> None:
    weight, x = integers(out, width, limit=127), integers(n, width, limit=2, seed=1)
    weight[:, 0] = 127  # the largest: a scale of one
    bias = integers(out, limit=100, seed=2)
    for added in (None, bias):
        found = kernels.linear(x, quantized(kernels, weight, added))
        exact = x.float() @ weight.float().T + (0 if added is None else added.float())
        assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("n", (1, 12, 13, 100))
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_other_weights_become_the_nearest_that_can_be_had(
    kernels: NativeKernels, n: int, width: int, out: int
) -> None:
    weight, x = noise(out, width), noise(n, width, seed=2) / width**0.5
    sizes = torch.logspace(-6, 3, out).bfloat16()  # a scale for each output
    weight, bias = weight * sizes[:, None], noise(out, seed=3) * sizes
    weight[3] = 0
    terms = x.float().abs() @ rounded(weight).abs().T
    for added in (None, bias):
        expected = x.float() @ rounded(weight).T + (0 if added is None else added.float())
        found = kernels.linear(x, quantized(kernels, weight, added)).float()
        assert ((found - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * terms).all()
    plain = kernels.linear(x, kernels.pack(weight, bias)).float()
    assert (found - plain).norm() <= 0.02 * plain.norm()


def test_half_the_bytes_and_a_number_each_output(kernels: NativeKernels) -> None:
    plain = kernels.pack(noise(96, 576), noise(96))
    small = kernels.quantize(plain)
    assert small.scales is not None and small.scales.shape == (96,)
    assert 2 * small.packed.nbytes == plain.packed.nbytes
    assert small.bias is plain.bias


@pytest.mark.parametrize("with_bias", (False, True))
def test_a_row_has_the_same_bits_whoever_is_beside_it(kernels: NativeKernels, with_bias: bool) -> None:
    for width, out in SHAPES:
        weights = quantized(kernels, noise(out, width), noise(out, seed=3) if with_bias else None)
        x = noise(max(ROWS), width, seed=1)
        alone = torch.cat([kernels.linear(row[None], weights) for row in x])
        for n in ROWS:
            assert torch.equal(kernels.linear(x[:n], weights), alone[:n])
            assert torch.equal(kernels.linear(x[-n:].contiguous(), weights), alone[-n:])
