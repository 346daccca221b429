"""The noise: fixed for ever by its three numbers, uniform and independent along each of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.compute.sampling.noise import (
    GUMBEL_BELOW_TAIL,
    TAIL_BITS,
    gumbel,
    gumbel_of,
    noise_bits,
    row_keys,
)
from engine.plan.step_records import Int64
from tests.support.sampling_reference import chi_square_tail

Uint32 = NDArray[np.uint32]
WORD = 2**32 - 1
LONG = 2**64 - 1
LOWEST, HIGHEST = -(2**31), 2**31 - 1
BITS = tuple(range(32))


def hashed(seed: int, position: int, token_id: int) -> int:
    """The same hash on Python's integers, as a number in [0, 2^32)."""

    def splitmix(key: int) -> int:
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & LONG
        key = (key ^ key >> 27) * 0x94D049BB133111EB & LONG
        return key ^ key >> 31

    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 16) * 0x7FEB352D & WORD
        return (bits ^ bits >> 15) * 0x846CA68B & WORD

    key = splitmix(seed + 0x9E3779B97F4A7C15 & LONG)
    key = splitmix(key + (position + 1) * 0x9E3779B97F4A7C15 & LONG)
    bits = mix(mix(token_id ^ key & WORD) + (key >> 32) & WORD)
    return bits ^ bits >> 16


def bits_of(seed: Int64, position: Int64, token_ids: torch.Tensor) -> Uint32:
    return np.asarray(noise_bits(row_keys(seed, position), token_ids).numpy().view(np.uint32))


def along(axis: str, count: int, start: int = 0) -> Uint32:
    """Noise bits with one of the three numbers counting up and the others fixed."""
    numbers = np.arange(start, start + count, dtype=np.int64)
    fixed = np.full(count, 12345, dtype=np.int64)
    if axis == "token":
        return bits_of(fixed[:1], fixed[:1], torch.from_numpy(numbers)).ravel()
    seed, position = (numbers, fixed) if axis == "seed" else (fixed, numbers)
    return bits_of(seed, position, torch.tensor([777])).ravel()


def test_the_noise_of_a_seed_never_changes() -> None:
    # A change here changes the text that every recorded seed gives.
    seed = np.array([0, 1, -1, 2**63 - 1], dtype=np.int64)
    position = np.array([0, 7, 2**40, 131071], dtype=np.int64)
    found = bits_of(seed, position, torch.tensor([0, 1, 49151]))
    assert found.tolist() == [
        [hashed(s, p, t) for t in (0, 1, 49151)]
        for s, p in zip(seed.tolist(), position.tolist(), strict=True)
    ]
    assert found[0].tolist() == [1375648884, 2213000719, 1310840814]


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_uniform_along_each_number(axis: str) -> None:
    bits = along(axis, 200_000)
    for shift in (24, 16, 8, 0):
        counts = np.bincount(bits >> shift & 0xFF, minlength=256)
        statistic = ((counts - len(bits) / 256) ** 2 / (len(bits) / 256)).sum()
        assert 1e-3 < chi_square_tail(float(statistic), 255) < 1 - 1e-4, (axis, shift)


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_independent_along_each_number(axis: str, lag: int) -> None:
    bits = along(axis, 100_000 + lag)
    first, second = bits[:-lag] >> 28, bits[lag:] >> 28
    counts = np.bincount(first.astype(np.int64) * 16 + second, minlength=256)
    statistic = ((counts - len(first) / 256) ** 2 / (len(first) / 256)).sum()
    assert chi_square_tail(float(statistic), 255) > 1e-4, (axis, lag)


def test_each_input_bit_flips_half_of_the_output_bits() -> None:
    rng = np.random.default_rng(1)
    seed = rng.integers(-(2**63), 2**63, size=4000, dtype=np.int64)
    position = rng.integers(0, 2**20, size=4000, dtype=np.int64)
    token_ids = torch.from_numpy(rng.integers(0, 2**17, size=(4000, 1)))
    base = bits_of(seed, position, token_ids)
    for bit in (0, 1, 15, 31, 32, 62):
        assert_flips_half(base ^ bits_of(seed ^ np.int64(1 << bit), position, token_ids))
    for bit in (0, 1, 10, 19):
        assert_flips_half(base ^ bits_of(seed, position ^ np.int64(1 << bit), token_ids))
    for bit in (0, 1, 8, 16):
        assert_flips_half(base ^ bits_of(seed, position, token_ids ^ (1 << bit)))


def assert_flips_half(flips: Uint32) -> None:
    rates = [float((flips >> bit & 1).mean()) for bit in BITS]
    assert all(0.46 < rate < 0.54 for rate in rates), rates  # 5 standard deviations of 4000 coins


def test_seed_and_position_are_not_interchangeable() -> None:
    numbers = np.arange(300, dtype=np.int64)
    seeds, positions = np.meshgrid(numbers, numbers)
    keys = row_keys(seeds.ravel(), positions.ravel())
    assert len(np.unique(keys.numpy(), axis=0)) == 300 * 300


def test_a_value_does_not_depend_on_the_call_around_it() -> None:
    seed, position = np.arange(16, dtype=np.int64), np.arange(100, 116, dtype=np.int64)
    whole = gumbel(seed, position, torch.arange(1000))
    order = np.random.default_rng(0).permutation(16)
    assert torch.equal(gumbel(seed[order], position[order], torch.arange(1000)), whole[order])
    few = torch.tensor([[3, 999], [0, 500]])
    assert torch.equal(gumbel(seed[4:6], position[4:6], few), whole[4:6].gather(1, few))


def test_gumbel_is_finite_increasing_and_standard() -> None:
    ends = gumbel_of(torch.tensor([LOWEST, -1, 0, HIGHEST], dtype=torch.int32))
    assert ends.isfinite().all()
    assert (ends.diff() > 0).all()
    assert ends[-1] == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), rel=1e-6)
    noise = gumbel(np.array([5]), np.array([9]), torch.arange(400_000))
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_noise_below_the_tail_is_bounded() -> None:
    edge = gumbel_of(torch.tensor([TAIL_BITS - 1, TAIL_BITS], dtype=torch.int32)).tolist()
    assert edge[0] < GUMBEL_BELOW_TAIL < edge[1]
    bits = noise_bits(row_keys(np.array([1]), np.array([2])), torch.arange(200_000))
    assert float((bits >= TAIL_BITS).double().mean()) == pytest.approx(1 / 64, rel=0.05)
