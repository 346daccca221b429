"""One tensor of pages as rows of numbers: as they are, or in 8 bits each with a scale for each row.

A row is one token's key or value of one head. Its bytes and its scale follow from its numbers alone: so a
token's K/V is the same however a sequence was cut into steps, shared or rewound.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

SCALE_BYTES = 4  # of a float32
# Kinds of numbers of 8 bits that rows are kept in, and the largest of each.
MOST_OF_BYTES: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
)
_LEAST = 1e-30  # as byte_rows.h has it: a row whose largest is less counts as zeros


class KvRows(Protocol):
    """What the paged tensors do with one tensor [num_blocks, num_kv_heads, block_size, width]."""

    def write(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """Store `numbers` [n, dim] at `rows` [n] of (block * num_kv_heads + head) * block_size + offset."""
        ...

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows, all of which are read before any is written."""
        ...

    def gather(self, heads: torch.Tensor) -> torch.Tensor:
        """Copies of the rows of `heads` [n] of block * num_kv_heads + head, good until the next call.

        [n, block_size * dim].
        """
        ...

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers of `blocks` [n]: [n, num_kv_heads, block_size, dim]."""
        ...


class PlainRows:
    """Numbers as they are."""

    def __init__(self, pages: torch.Tensor, scratch: Scratch) -> None:
        self._pages = pages
        self._by_head = pages.flatten(2).flatten(0, 1)  # [num_blocks * num_kv_heads, block_size * dim]
        self._by_position = pages.flatten(0, 2)  # [num_blocks * num_kv_heads * block_size, dim]
        self._scratch = scratch

    def write(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """See KvRows."""
        self._by_position.index_copy_(0, rows, numbers)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See KvRows."""
        self._by_position.index_copy_(0, targets, self._by_position.index_select(0, sources))

    def gather(self, heads: torch.Tensor) -> torch.Tensor:
        """See KvRows."""
        out = self._scratch.take(len(heads), self._by_head.shape[1])
        return torch.index_select(self._by_head, 0, heads, out=out)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """See KvRows."""
        return self._pages[blocks]


class LeadingNumbers:
    """The first `dim` numbers of the rows of `keys`, of `key_dim`: what is written here is there already."""

    def __init__(self, keys: KvRows, key_dim: int, dim: int) -> None:
        self._keys, self._key_dim, self._dim = keys, key_dim, dim

    def write(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """See KvRows."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See KvRows."""

    def gather(self, heads: torch.Tensor) -> torch.Tensor:
        """See KvRows."""
        whole = self._keys.gather(heads)
        return whole.view(len(heads), -1, self._key_dim)[..., : self._dim].flatten(1)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """See KvRows."""
        return self._keys.read(blocks)[..., : self._dim]


class ByteRows:
    """Numbers of the 8-bit type `kept`. Each head of a block has its rows, and behind these their scales.

    `pages` is int8 [num_blocks, num_kv_heads, block_size, dim + SCALE_BYTES], of which no row is one token's.
    """

    def __init__(self, pages: torch.Tensor, dtype: torch.dtype, kept: torch.dtype) -> None:
        self._shape = pages.shape
        block_size, dim = pages.shape[2], pages.shape[3] - SCALE_BYTES
        self._heads = pages.flatten(2).flatten(0, 1)
        self._bytes = self._heads[:, : block_size * dim].view(-1, block_size, dim)
        self._scales = self._heads[:, block_size * dim :].view(torch.float32)  # [heads, block_size]
        self._dtype = dtype
        self._kept = kept

    def write(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        """See KvRows."""
        place = self._place(rows)
        kept, scales = to_bytes(numbers, self._kept)
        self._bytes[place], self._scales[place] = kept.view(torch.int8), scales

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See KvRows."""
        source, target = self._place(sources), self._place(targets)
        self._bytes[target], self._scales[target] = self._bytes[source], self._scales[source]

    def gather(self, heads: torch.Tensor) -> torch.Tensor:
        """See KvRows."""
        numbers = self._bytes[heads].view(self._kept).float() * self._scales[heads][..., None]
        return numbers.to(self._dtype).flatten(1)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """See KvRows."""
        heads = blocks[:, None] * self._shape[1] + torch.arange(self._shape[1], device=blocks.device)
        return self.gather(heads.flatten()).view(len(blocks), *self._shape[1:3], -1)

    def _place(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = rows.div(self._shape[2], rounding_mode="floor")
        return heads, rows - heads * self._shape[2]


def to_bytes(numbers: torch.Tensor, kept: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., dim] in the 8-bit type `kept`, and scales [...] to multiply them with.

    The largest number of a row is the largest of its type. A row with numbers that are not finite gets a
    scale that is not.
    """
    most = MOST_OF_BYTES[kept]
    numbers = numbers.float()
    largest = numbers.abs().amax(-1)
    quotient = torch.tensor(most) / largest  # a plain number would be multiplied with a reciprocal
    inverse = torch.where((largest > _LEAST) & largest.isfinite(), quotient, 0.0)
    scaled = (numbers * inverse[..., None]).nan_to_num(0.0)
    return (scaled if kept.is_floating_point else scaled.round()).to(kept), largest / most


class Scratch:
    """A buffer that only grows: page faults of fresh memory can cost more than the copying itself."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width] of anything."""
        needed = num_rows * width
        if self._buffer.numel() < needed:
            self._buffer = self._buffer.new_empty(needed)
        return self._buffer[:needed].view(num_rows, width)
