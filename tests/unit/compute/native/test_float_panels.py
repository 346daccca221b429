"""Products with weights of 8-bit floats: exact in their numbers, and the same bits in any crowd and form."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Format

from engine.compute.native.block_panels import BlockPanels, joined
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.records import BLOCKS, MIXED, NUMBERS
from tests.support.float_codes import SPAN, every_float, float_numbers
from tests.support.gguf_blocks import random_blocks
from tests.support.native import FLOAT32_FORM, compiled_kernels

DTYPES = {torch.bfloat16: "auto", torch.float32: FLOAT32_FORM}


@pytest.fixture(params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    kernels = compiled_kernels(request.param, DTYPES[request.param], formats=True)
    kernels.team.resize(2)
    return kernels


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(kernels: NativeKernels, out: int, width: int) -> tuple[BlockPanels, torch.Tensor]:
    """In panels, and as numbers."""
    codes, scales = every_float(out, width), 0.001 + noise(out, -(-width // SPAN), seed=2).abs() / 100
    return kernels.pack_floats(codes, scales), float_numbers(codes, scales)


@pytest.mark.parametrize(("width", "out"), [(128, 32), (576, 100), (50, 64)])
def test_products_are_of_the_stored_weights(kernels: NativeKernels, width: int, out: int) -> None:
    panels, weight = packed(kernels, out, width)
    x, bias = noise(100, width, seed=1).to(kernels.dtype), noise(out, seed=3).to(kernels.dtype)
    weights = joined([panels], bias)
    whole = kernels.linear(x, weights)
    expected = x.double() @ weight.T + bias.double()
    rounding = torch.finfo(kernels.dtype).eps
    torch.testing.assert_close(
        whole.double(), expected, rtol=rounding, atol=2e-6 * width**0.5 * float(weight.abs().max())
    )
    for n in (*range(1, 33), 63, 96, 97):
        assert torch.equal(kernels.linear(x[3 : 3 + n].contiguous(), weights), whole[3 : 3 + n])


def test_they_stand_beside_other_formats(kernels: NativeKernels) -> None:
    """As a projection that a checkpoint leaves as it was stands beside those that it has in 8 bits."""
    x = noise(9, 256, seed=1).to(kernels.dtype)
    floats, _ = packed(kernels, 64, 256)
    plain = kernels.pack_plain(noise(32, 256, seed=4).to(kernels.dtype))
    blocks = kernels.pack_blocks(int(Format.Q8_0), random_blocks(Format.Q8_0, 32, 256), 256)
    for parts, kind in (((floats, plain), NUMBERS), ((plain, floats, blocks), MIXED), ((blocks,), BLOCKS)):
        together = joined(parts)
        assert together.kind == kind
        apart = [kernels.linear(x, joined([part])) for part in parts]
        assert torch.equal(kernels.linear(x, together), torch.cat(apart, dim=1))


def test_they_take_a_byte_each_and_a_scale_for_128(kernels: NativeKernels) -> None:
    panels, _ = packed(kernels, 64, 1024)
    assert panels.panels.nbytes == 64 * 1024 * (1 + 4 / SPAN)


def test_what_is_not_finite_stays_so(kernels: NativeKernels) -> None:
    panels, _ = packed(kernels, 32, 256)
    for wrong in (torch.nan, torch.inf):
        x = noise(3, 256).to(kernels.dtype)
        x[1, 7] = wrong
        found = kernels.linear(x, joined([panels]))
        assert not found[1].isfinite().any() and found[::2].isfinite().all()
