"""Products with weights as GGUF files store them: exact in integers, and the same bits in any crowd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from numpy.typing import NDArray

from engine.compute.native.block_panels import PLAIN, joined
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.packed_weights import PackedWeights
from tests.support.gguf_blocks import BLOCK_FORMATS, in_blocks, random_blocks, unpacked
from tests.support.native import compiled_kernels

ROWS = (1, 2, 3, 6, 7, 12, 13, 32, 95, 96, 97)  # around one tile, one block of rows, and more


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels(formats=True)


@pytest.fixture(autouse=True)
def threads(kernels: NativeKernels) -> None:
    kernels.team.resize(2)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(
    kernels: NativeKernels,
    kind: Format,
    stored: NDArray[np.uint8],
    width: int,
    bias: torch.Tensor | None = None,
) -> PackedWeights:
    return joined([kernels.pack_blocks(int(kind), stored, width)], bias)


@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("width", "out"), [(256, 32), (768, 100)])
def test_products_are_of_the_stored_weights(
    kernels: NativeKernels, kind: Format, width: int, out: int
) -> None:
    stored, x, bias = random_blocks(kind, out, width), noise(200, width, seed=1), noise(out, seed=2)
    weights = packed(kernels, kind, stored, width, bias)
    whole = kernels.linear(x, weights)
    expected = in_blocks(x) @ unpacked(kind, stored).double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=1e-5 * float(expected.abs().max()))
    for n in ROWS:
        assert torch.equal(kernels.linear(x[3 : 3 + n].contiguous(), weights), whole[3 : 3 + n])


@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_a_row_is_read_as_it_was_stored(kernels: NativeKernels, kind: Format) -> None:
    stored = random_blocks(kind, 70, 512)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    weights = joined([kernels.pack_blocks(int(kind), stored, 512, order.numpy())])
    chosen = torch.tensor([69, 0, 31, 32, 69])
    expected = unpacked(kind, stored)[order][chosen].bfloat16()
    assert torch.equal(kernels.read_rows(weights, chosen), expected)


def test_formats_stand_side_by_side(kernels: NativeKernels) -> None:
    """As in real files, where of one layer's projections one may have more bits; elements among them."""
    kinds = (Format.Q4_K, Format.Q6_K, Format.Q8_0)
    stored = [random_blocks(kind, 64, 256, seed=int(kind)) for kind in kinds]
    parts = [kernels.pack_blocks(int(kind), each, 256) for kind, each in zip(kinds, stored, strict=True)]
    plain = noise(32, 256, seed=9)
    x = noise(40, 256, seed=1)
    together = kernels.linear(x, joined([*parts[:2], kernels.pack_plain(plain), parts[2]]))
    apart = [kernels.linear(x, joined([part])) for part in parts]
    assert kernels.pack_plain(plain).format == PLAIN
    apart.insert(2, kernels.linear(x, kernels.pack(plain)))
    assert torch.equal(together, torch.cat(apart, dim=1))


def test_what_is_not_finite_stays_so(kernels: NativeKernels) -> None:
    weights = packed(kernels, Format.Q8_0, random_blocks(Format.Q8_0, 32, 256), 256)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = noise(3, 256)
        x[1, 7] = wrong
        found = kernels.linear(x, weights)
        assert found[1].isnan().all() and found[::2].isfinite().all()
    assert torch.equal(kernels.linear(torch.zeros(1, 256).bfloat16(), weights), torch.zeros(1, 32).bfloat16())


def test_widths_that_a_format_has_no_blocks_for(kernels: NativeKernels) -> None:
    assert kernels.packs_format(int(Format.Q8_0), 96) and not kernels.packs_format(int(Format.Q4_K), 96)
    assert not kernels.packs_format(int(Format.IQ1_S), 256)


def test_no_rows_are_no_work() -> None:
    """As of the head in a step that computes a part of a prompt and draws nothing."""
    kernels = compiled_kernels(formats=True)
    packed = joined([kernels.pack_blocks(int(Format.Q8_0), random_blocks(Format.Q8_0, 64, 256), 256)])
    assert kernels.linear(torch.empty(0, 256, dtype=torch.bfloat16), packed).shape == (0, 64)
