"""A drafter's layer on the kernels: the drafts of tensor operations, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_layer import load_eagle_layer
from engine.compute.drafters.eagle_round import GUESSES
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.layer_chains import EagerSteps, LayerChains
from engine.compute.drafters.slab_rows import RowsApart
from engine.compute.native.eagle import NativeEagle
from engine.compute.native.kernels import NativeKernels
from tests.support.eagle_rounds import assert_alike, made_round
from tests.support.native import FLOAT32_FORM, compiled_kernels
from tests.support.packed import load_tiny
from tests.support.speculated import single_threaded
from tests.support.tiny_eagle import TinyEagle

DTYPE = torch.float32  # in which two ways of summing hardly ever draw two tokens
MOST = 5


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> EagleWeights:
    target = load_tiny("llama", DTYPE)
    tiny = TinyEagle(target, token_ids=torch.arange(3, 303, 3))  # no whole panels
    return EagleWeights.of(load_eagle_layer(tiny.save(tmp_path_factory.mktemp("eagle") / "x"), target))


@pytest.fixture(scope="module", params=[FLOAT32_FORM, pytest.param("auto", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return compiled_kernels(DTYPE, request.param, formats=True)


def both(
    weights: EagleWeights, kernels: NativeKernels, least_chance: float = 0.0, *, in_bytes: bool = False
) -> tuple[NativeEagle, LayerChains]:
    """Each over K/V of its own."""
    assert NativeEagle.fits(weights, kernels)
    sizes = weights.sizes
    layer = LayerKv(sizes.kv_heads, sizes.head_dim, sizes.head_dim)
    kvs = [EagleKv(layer, sizes.window, 8, MOST, weights.head) for _ in range(2)]
    steps = EagerSteps(TorchEagle(weights), partial(RowsApart, kvs[1]), GUESSES)
    plain = LayerChains(steps, least_chance)
    return NativeEagle(weights, kernels, kvs[0], least_chance, in_bytes=in_bytes), plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("rows", "drafts"),
    [([1], [1]), ([1], [5]), ([9], [0]), ([2, 1, 7], [5, 3, 1]), ([9, 3, 1, 1], [4, 4, 1, 0])],
)
def test_drafts_are_those_of_tensor_operations(
    rows: list[int], drafts: list[int], temperature: float, weights: EagleWeights, kernels: NativeKernels
) -> None:
    native, plain = both(weights, kernels)
    kept = [0] * len(rows)
    for turn in range(3):  # each round over the K/V of those before
        work = made_round(rows, drafts, kept, temperature=temperature, seed=turn)
        work = replace(work, slabs=list(range(len(rows))))
        found, expected = native.run(work), plain.run(work)
        assert_alike(found, expected, drawn=bool(temperature))
        assert all(len(chain) <= most for chain, most in zip(found, drafts, strict=True))
        assert max(map(len, found)) > 1 or max(drafts) <= 1
        kept = [before + some for before, some in zip(kept, rows, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_features_that_are_not_finite_leave_their_own_sequence_without_drafts(
    temperature: float, weights: EagleWeights, kernels: NativeKernels
) -> None:
    native, plain = both(weights, kernels)
    work = made_round([2, 1, 3], [4, 4, 4], [0, 0, 0], temperature=temperature)
    work.features[2] = torch.nan
    found, expected = native.run(work), plain.run(work)
    assert_alike(found, expected, drawn=bool(temperature))
    assert [bool(chain) for chain in found] == [True, False, True]


def test_weights_of_8_bits_seldom_change_the_first_guess(
    weights: EagleWeights, kernels: NativeKernels
) -> None:
    native, plain = both(weights, kernels, in_bytes=True)
    num_same, errors = 0, []
    for seed in range(20):
        work = made_round([3, 1, 2, 5], [1, 1, 1, 1], [0, 0, 0, 0], seed=seed)
        for (own,), (like,) in zip(native.run(work), plain.run(work), strict=True):
            num_same += own[0].token_id == like[0].token_id
            errors.append(abs(own[0].chance - like[0].chance))
    assert num_same >= 0.9 * len(errors)
    assert 0 < np.mean(errors) < 0.03


def test_a_chain_that_is_unlikely_ends(weights: EagleWeights, kernels: NativeKernels) -> None:
    native, plain = both(weights, kernels, least_chance=0.2)
    work = made_round([3, 5, 2, 4], [5, 5, 5, 5], [0, 0, 0, 0])
    found = native.run(work)
    assert_alike(found, plain.run(work), drawn=False)
    assert len(set(map(len, found))) > 1, "not all end at once"
    for chain in found:
        assert all(guesses[0].chance >= 0.2 for guesses in chain[:-1])


def test_a_chain_ends_where_nothing_behind_it_could_be_among_the_best(
    weights: EagleWeights, kernels: NativeKernels
) -> None:
    native, plain = both(weights, kernels)
    work = made_round([3, 5, 2, 4], [2, 2, 2, 2], [0, 0, 0, 0])
    longer = replace(work, num_drafts=[5, 5, 5, 5], num_wanted=[5, 5, 5, 5])
    found, whole = native.run(work), native.run(longer)
    assert_alike(found, plain.run(work), drawn=False)
    for chain, other in zip(found, whole, strict=True):
        best = sorted((guess.chance for guesses in other for guess in guesses), reverse=True)[:2]
        assert sorted((g.chance for guesses in chain for g in guesses), reverse=True)[:2] == best


def test_the_drafts_are_the_same_on_any_number_of_threads(
    weights: EagleWeights, kernels: NativeKernels
) -> None:
    work = made_round([16, 3, 1, 1], [5, 4, 4, 1], [0, 0, 0, 0], temperature=0.7)
    expected = both(weights, kernels)[0].run(work)
    team = kernels.team
    for threads in (2, 3):
        team.resize(threads)
        assert all(both(weights, kernels)[0].run(work) == expected for _ in range(5))
    team.resize(1)
