"""The paged K/V tensors of every layer: where tokens are written and whole blocks are moved.

Owns the layout and nothing else; which block belongs to whom is decided in engine.plan.kv.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.compute.attention.huge_pages import HugePages, fill_in_background
from engine.compute.attention.layer_kv import LayerKv
from engine.plan.step_records import BlockCopy, Int64

_LARGE_BYTES = 64 << 20  # worth a thread of its own to find the memory


def bytes_per_block(layers: Iterable[LayerKv], block_size: int, dtype: torch.dtype) -> int:
    """What one block of `block_size` tokens costs in all layers together."""
    numbers = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    return numbers * block_size * dtype.itemsize


class KvTensors:
    """Keys and values of each layer as [num_blocks, num_kv_heads, block_size, dim], zeros at first.

    Heads lie outside positions, so that gathering (block, head) rows gives each head one dense run of
    positions: what a batched matrix product wants. Used on the model's thread only.
    """

    def __init__(
        self,
        layers: Sequence[LayerKv],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        pages = HugePages(num_blocks * self.block_bytes)
        self.keys = [self._zeros(pages, layer.num_kv_heads, layer.key_dim) for layer in self.layers]
        self.values = [self._zeros(pages, layer.num_kv_heads, layer.value_dim) for layer in self.layers]
        if device.type == "cpu" and num_blocks * self.block_bytes >= _LARGE_BYTES:
            fill_in_background(self.tensors)
        self._key_heads = [_by_block_and_head(keys) for keys in self.keys]
        self._value_heads = [_by_block_and_head(values) for values in self.values]
        self._key_rows = [_by_position(keys) for keys in self.keys]
        self._value_rows = [_by_position(values) for values in self.values]
        self._key_scratch = _Scratch(dtype, device)
        self._value_scratch = _Scratch(dtype, device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, each [num_blocks, num_kv_heads, block_size, dim]."""
        return (*self.keys, *self.values)

    @property
    def block_bytes(self) -> int:
        """What one block costs in all layers together."""
        return bytes_per_block(self.layers, self.block_size, self.dtype)

    def rows_of(self, slots: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Where `write` puts the tokens of `slots` in a layer of `num_kv_heads`: [num_tokens * num_kv_heads].

        Equal for all layers with as many heads, so a step computes it once.
        """
        blocks = slots.div(self.block_size, rounding_mode="floor")
        offsets = slots - blocks * self.block_size
        heads = torch.arange(num_kv_heads, device=slots.device)
        return ((blocks[:, None] * num_kv_heads + heads) * self.block_size + offsets[:, None]).flatten()

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [num_tokens, num_kv_heads, dim] at `rows`, which come from `rows_of` and all differ."""
        self._key_rows[layer].index_copy_(0, rows, key.reshape(-1, key.shape[-1]))
        self._value_rows[layer].index_copy_(0, rows, value.reshape(-1, value.shape[-1]))

    def head_index(self, blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """The index that `gather` takes for `blocks` [num_sequences, max_blocks] in such a layer."""
        heads = torch.arange(num_kv_heads, device=blocks.device)
        return (blocks[:, None, :] * num_kv_heads + heads[:, None]).flatten()

    def gather(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and of the values behind `index`, good until the next call.

        Each [num_sequences * num_kv_heads * max_blocks, block_size * dim], in an order that makes a view as
        [num_sequences * num_kv_heads, positions, dim] dense.
        """
        keys, values = self._key_heads[layer], self._value_heads[layer]
        return (
            torch.index_select(keys, 0, index, out=self._key_scratch.take(len(index), keys.shape[1])),
            torch.index_select(values, 0, index, out=self._value_scratch.take(len(index), values.shape[1])),
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer; all sources are read before any target is written."""
        if not copies:
            return
        sources = torch.tensor([copy.source for copy in copies], device=self.device)
        targets = torch.tensor([copy.target for copy in copies], device=self.device)
        for tensor in self.tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def move_rows(self, sources: Int64, targets: Int64) -> None:
        """Copy single slots in every layer; all sources are read before any target is written.

        Both are [n] of block * block_size + offset, on the host; the targets all differ.
        """
        if not len(sources):
            return
        slots = torch.tensor(np.stack((sources, targets)), device=self.device)  # [2, n]
        by_heads: dict[int, torch.Tensor] = {}  # [2, n * num_kv_heads]
        for layer, shape in enumerate(self.layers):
            heads = shape.num_kv_heads
            if heads not in by_heads:
                by_heads[heads] = torch.stack([self.rows_of(of, heads) for of in slots])
            source, target = by_heads[heads]
            for rows in (self._key_rows[layer], self._value_rows[layer]):
                rows.index_copy_(0, target, rows.index_select(0, source))

    def scrub_blocks(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in every layer, so that nothing non-finite in them reaches a later owner."""
        if not blocks:
            return
        index = torch.tensor(list(blocks), device=self.device)
        for tensor in self.tensors:
            tensor.index_fill_(0, index, 0.0)

    def _zeros(self, pages: HugePages, num_kv_heads: int, dim: int) -> torch.Tensor:
        shape = (self.num_blocks, num_kv_heads, self.block_size, dim)
        if self.device.type == "cpu":
            return pages.zeros(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class _Scratch:
    """A buffer that only grows: page faults of fresh memory can cost more than the copying itself."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width] of anything."""
        needed = num_rows * width
        if self._buffer.numel() < needed:
            self._buffer = self._buffer.new_empty(needed)
        return self._buffer[:needed].view(num_rows, width)


def _by_block_and_head(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(2).flatten(0, 1)  # [num_blocks * num_kv_heads, block_size * dim]


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, 2)  # [num_blocks * num_kv_heads * block_size, dim]
