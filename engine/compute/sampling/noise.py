"""The noise behind every draw: a stateless hash of (request seed, position, token id), made Gumbel noise.

Drafting from a distribution, and judging such drafts, need more numbers that are independent of these; they
come from streams beside the target's, keyed the same way.

Nothing is stored and nothing advances, so a token's noise is the same alone or in a batch, in any row, after
a restart, on any device: only integer arithmetic stands between the three numbers and the 32 noise bits.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from engine.plan.step_records import Int64

Uint64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NUM_VALUES = 2**32


def _signed(word: int) -> int:
    return word - _NUM_VALUES if word >= _NUM_VALUES // 2 else word


_MULTIPLIER_1 = _signed(0x7FEB352D)
_MULTIPLIER_2 = _signed(0x846CA68B)

# One token in 64 has noise bits from TAIL_BITS on; the noise of all others is below the bound.
TAIL_BITS = 2**31 - _NUM_VALUES // 64
GUMBEL_BELOW_TAIL = -math.log(-math.log((TAIL_BITS + 2**31) / _NUM_VALUES))


class Stream(Enum):
    """What a number is drawn for; the values are salts, and streams are independent of each other.

    TARGET is the noise of every token drawn from the model itself, by plain sampling or under `match`. Under
    `rejection` and `block`, DRAFT draws the drafts, ACCEPT decides on them, and RECOVER draws the recovered
    or bonus token.
    """

    TARGET = 0
    DRAFT = 0xD6E8FEB86659FD93
    ACCEPT = 0xA0761D6478BD642F
    RECOVER = 0xE7037ED1A0B428DB


def row_keys(seed: Int64, position: Int64, stream: Stream = Stream.TARGET) -> torch.Tensor:
    """The hash keys of R rows, int32 [R, 2] on the CPU: splitmix64 (Steele, Lea, Flood 2014), twice."""
    key = _finalise64(seed.view(np.uint64) + _GOLDEN)
    key = _finalise64(key + (position.view(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(stream.value))
    words = key.astype("<u8", copy=False).view("<i4").reshape(-1, 2)  # the lower half first
    return torch.from_numpy(words)


def noise_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 uniform bits for each (row, token), int32 [rows, n]; `keys` [rows, 2], `token_ids` [rows, n] or [n].

    Four multiplications with folds between them, the constants by C. Wellons (hash-prospector), and half of
    the row's key before each two.
    """
    bits = token_ids.to(torch.int32) ^ keys[:, :1]  # [rows, n]
    scratch = torch.empty_like(bits)
    _mix_(bits, scratch)
    bits += keys[:, 1:]
    return _fold_(_mix_(bits, scratch), 16, scratch)


def gumbel_of(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float64, increasing in `bits`; -log(-log u), u = (bits + 2^31 + 1/2) / 2^32.

    u is exact in float64 and strictly inside (0, 1). float64 keeps the choice the same on every device: their
    logarithms differ in the last bit only, far below the distance of two scores.
    """
    uniform = (bits.double() + (2**31 + 0.5)) / _NUM_VALUES
    return uniform.log_().neg_().log_().neg_()


def uniforms(keys: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Uniform numbers strictly inside (0, 1), float64 [rows, n]: 52 bits each of noise.

    `keys` is [rows, 2]; `labels`, [rows, n] below 2^30, tell the numbers of one key apart.
    """
    high = noise_bits(keys, labels * 2).double() + 2**31
    low = (noise_bits(keys, labels * 2 + 1) >> 12).double() + 2**19
    return (high + (low + 0.5) / 2**20) / _NUM_VALUES


def gumbel(seed: Int64, position: Int64, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise itself: G(seed, position, token) in float64, on the device of `token_ids` ([R, n] or [n])."""
    return gumbel_of(noise_bits(row_keys(seed, position).to(token_ids.device), token_ids))


def _finalise64(key: Uint64) -> Uint64:
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def _mix_(bits: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    _fold_(bits, 16, scratch).mul_(_MULTIPLIER_1)
    return _fold_(bits, 15, scratch).mul_(_MULTIPLIER_2)


def _fold_(bits: torch.Tensor, shift: int, scratch: torch.Tensor) -> torch.Tensor:
    # torch shifts int32 arithmetically; the mask makes it the logical shift that the hash needs.
    torch.bitwise_right_shift(bits, shift, out=scratch)
    return bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
