"""Projections whose outputs fill no panel: what a row gets, alone and among many, and where they stand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.native.kernels import NativeKernels
from engine.compute.native.padded_linear import PaddedLinear
from engine.compute.native.places import Place, find_places
from engine.compute.native.quantization import Q8_0
from tests.support.native import FLOAT32_FORM, compiled_kernels
from tests.support.speculated import single_threaded
from tests.support.tiny_models import tiny_model

WIDE = nn.Linear(1024, 1041)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels(torch.float32, FLOAT32_FORM, formats=True)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [33, 97, 127])
def test_a_row_gets_its_product_in_any_company(kernels: NativeKernels, outputs: int, bias: bool) -> None:
    torch.manual_seed(outputs)
    linear = nn.Linear(128, outputs, bias=bias)
    with single_threaded():
        made, rows = PaddedLinear(kernels, linear), torch.randn(3, 20, 128)
        together = made(rows)
        torch.testing.assert_close(together, F.linear(rows, linear.weight, linear.bias), rtol=1e-4, atol=1e-5)
        assert together.shape == (3, 20, outputs) and made.out_features == outputs
        assert made.weight.dtype is torch.float32
        for row in range(20):
            assert torch.equal(made(rows[1, row]), together[1, row])


def test_only_projections_of_odd_widths_fit() -> None:
    assert PaddedLinear.fits(WIDE, torch.float32)
    assert not PaddedLinear.fits(WIDE, torch.bfloat16)
    assert not PaddedLinear.fits(nn.Linear(1024, 1024), torch.float32)  # as it is
    assert PaddedLinear.fits(nn.Linear(1024, 33), torch.float32)  # gates of heads
    assert not PaddedLinear.fits(nn.Linear(1024, 1), torch.float32)  # that of a shared expert
    assert not PaddedLinear.fits(nn.Linear(1023, 1041), torch.float32)
    assert not PaddedLinear.fits(nn.Linear(256, 5001), torch.float32)  # a vocabulary
    assert not PaddedLinear.fits(nn.Conv1d(1, 1, 1), torch.float32)


@torch.inference_mode()
def test_its_weights_may_be_of_few_bits(kernels: NativeKernels) -> None:
    with single_threaded():
        made, rows = PaddedLinear(kernels, WIDE), torch.randn(5, 1024)
        made.padded.weights = kernels.quantize(made.padded.weights, Q8_0)
        torch.testing.assert_close(made(rows), WIDE(rows), rtol=0.1, atol=0.05)


def test_the_first_projection_of_mamba_2_has_such_a_place() -> None:
    model = tiny_model("granite_hybrid")
    found = [place for place in find_places(model, torch.float32) if place.name.endswith("in_proj")]
    assert found and {place.name_of_kind for place in found} == {Place.LINEAR}
