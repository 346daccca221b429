"""A drafter's layer on the kernels: the drafts of tensor operations, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_layer import load_eagle_layer
from engine.compute.drafters.eagle_round import Chain, EagleNoise, EagleRound, Guess
from engine.compute.drafters.eagle_torch import TorchEagle
from engine.compute.drafters.eagle_weights import EagleWeights
from engine.compute.drafters.layer_chains import LayerChains
from engine.compute.native.eagle import NativeEagle
from engine.compute.native.kernels import NativeKernels
from engine.compute.runner.dummy_steps import plain_sampling
from engine.compute.sampling.noise import row_keys
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
    plain = LayerChains(TorchEagle(weights, kvs[1]), least_chance)
    return NativeEagle(weights, kernels, kvs[0], least_chance, in_bytes=in_bytes), plain


def made_round(
    rows: list[int], drafts: list[int], kept: list[int], *, temperature: float = 0.0, seed: int = 0
) -> EagleRound:
    """Sequences with so many new rows each; their features are as random as their tokens."""
    rng = np.random.default_rng(seed)
    draw = torch.Generator().manual_seed(seed)
    count = len(rows)
    positions = np.concatenate(
        [np.arange(first, first + some) + 7 for first, some in zip(kept, rows, strict=True)]
    )
    sampling = plain_sampling(np.arange(count) + 50, temperature)
    sampling.seed[:] = rng.integers(0, 2**60, count)
    sampling.top_p[::2] = 0.9
    sampling.min_p[::3] = 0.02
    most = max(drafts)
    places = (sampling.position[:, None] + np.arange(most)).reshape(-1)
    keys = row_keys(np.repeat(sampling.seed, most), places).view(count, most, 2)
    return EagleRound(
        features=torch.randn((sum(rows), 3 * 64), generator=draw, dtype=DTYPE),
        token_ids=rng.integers(3, 500, sum(rows)).tolist(),
        positions=positions.tolist(),
        num_rows=rows,
        num_kept=kept,
        slabs=rng.permutation(8)[:count].tolist(),
        num_drafts=drafts,
        num_wanted=drafts,
        noise=EagleNoise(sampling, keys) if temperature else None,
    )


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


def assert_alike(found: list[Chain], expected: list[Chain], *, drawn: bool) -> None:
    """But for rounding.

    Where noise draws, the kernel lists only what could win, so fewer others stand beside a chain and it may
    be longer.
    """
    if drawn:
        expected = [chain[: len(own)] for chain, own in zip(expected, found, strict=True)]
        found = [own[: len(chain)] for chain, own in zip(expected, found, strict=True)]
    assert [len(chain) for chain in found] == [len(chain) for chain in expected]
    for own, other in zip(chain_of(found), chain_of(expected), strict=True):
        for guess, like in zip(own, other, strict=not drawn):
            assert guess.token_id == like.token_id
            assert guess.chance == pytest.approx(like.chance, rel=1e-3, abs=1e-6)


def chain_of(chains: list[Chain]) -> list[list[Guess]]:
    """The guesses of all chains, position by position."""
    return [guesses for chain in chains for guesses in chain]


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
