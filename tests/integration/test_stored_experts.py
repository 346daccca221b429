"""Experts with stored weights: what unpacks them for each use, and the kernels, make the same of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Format
from gguf.quants import quantize
from torch import nn
from transformers.activations import ACT2FN

from engine.compute.loading.stored_weights import ExpertWeights, StoredExperts, StoredWeight
from engine.compute.native.experts import NativeExperts
from engine.compute.native.records import BLOCKS, MIXED, NUMBERS, Activation
from engine.compute.native.stored import packed_experts
from tests.support.expert_mixtures import Mixture, random_rows
from tests.support.native import compiled_kernels

HIDDEN, WIDTH = 64, 96


def stored(kind: Format, weights: torch.Tensor) -> StoredWeight:
    """Weights [experts, out, in] as a file of that format has them."""
    rows = weights.float().flatten(0, 1).numpy()
    blocks = quantize(rows, kind).view(np.uint8).reshape(len(rows), -1)
    return StoredWeight(kind, blocks, len(rows), rows.shape[1])


def in_pieces(weight: StoredWeight, count: int) -> list[StoredWeight]:
    """One piece for each expert, as safetensors have them."""
    each = weight.out // count
    return [
        StoredWeight(weight.format, weight.blocks[first : first + each], each, weight.in_features)
        for first in range(0, weight.out, each)
    ]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("kinds", "kept_as"),
    [
        ((Format.Q8_0, Format.Q8_0, Format.Q4_0), {BLOCKS}),
        ((Format.BF16, Format.Q8_0, Format.F16), {MIXED, NUMBERS}),
        ((Format.F32, Format.F32, Format.F32), {NUMBERS}),
    ],
)
def test_experts_of_any_formats(kinds: tuple[Format, ...], kept_as: set[int], one_by_one: bool) -> None:
    mixture = Mixture.random(HIDDEN, WIDTH, torch.bfloat16)
    gate, up = mixture.gate_up.chunk(2, dim=1)
    parts = [stored(kind, each) for kind, each in zip(kinds, (gate, up, mixture.down), strict=True)]
    pieces = [in_pieces(part, Mixture.COUNT) if one_by_one else [part] for part in parts]
    weights = ExpertWeights(Mixture.COUNT, *pieces)
    plain = StoredExperts(weights, nn.SiLU())
    made = packed_experts(compiled_kernels(formats=True), plain)
    assert isinstance(made, NativeExperts)
    assert {made.gate_up.weights.kind, made.down.weights.kind} == kept_as
    for n in (1, 9, 70):
        x, chosen, shares = random_rows(n, HIDDEN, torch.bfloat16)
        chosen[0, 0] = Mixture.COUNT  # which no expert has
        expected, found = plain(x, chosen, shares).double(), made(x, chosen, shares).double()
        assert ((found - expected).norm(dim=-1) <= 0.03 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("kind", [Format.Q8_0, Format.Q4_0, Format.BF16])
def test_experts_without_gates(kind: Format) -> None:
    mixture = Mixture.random(HIDDEN, WIDTH, torch.bfloat16, Activation.RELU_SQUARED, is_gated=False)
    up, down = (in_pieces(stored(kind, each), Mixture.COUNT) for each in (mixture.gate_up, mixture.down))
    plain = StoredExperts(ExpertWeights(Mixture.COUNT, [], up, down), ACT2FN["relu2"])
    made = packed_experts(compiled_kernels(formats=True), plain)
    assert isinstance(made, NativeExperts)
    x, chosen, shares = random_rows(40, HIDDEN, torch.bfloat16)
    expected, found = plain(x, chosen, shares).double(), made(x, chosen, shares).double()
    assert ((found - expected).norm(dim=-1) <= 0.03 * expected.norm(dim=-1)).all()
    whole = mixture.expected(x, chosen, shares)
    near = 0.2 if kind == Format.Q4_0 else 0.03
    assert (expected - whole).norm() <= near * whole.norm()


def test_experts_of_no_whole_panels_stay_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 48, 64, generator=generator) for _ in range(2))
    down = torch.randn(2, 64, 48, generator=generator)
    kinds = (Format.Q8_0, Format.Q8_0, Format.F16)
    parts = [[stored(kind, each)] for kind, each in zip(kinds, (gate, up, down), strict=True)]
    experts = StoredExperts(ExpertWeights(2, *parts), nn.SiLU())
    assert packed_experts(compiled_kernels(formats=True), experts) is None
