"""The paged K/V tensors of every layer: where tokens are written and whole blocks are moved.

Owns the layout and nothing else; which block belongs to whom is decided in engine.plan.kv.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.compute.attention.huge_pages import HugePages, fill_in_background
from engine.compute.attention.kv_rows import (
    MOST_OF_BYTES,
    SCALE_BYTES,
    ByteRows,
    KvRows,
    LeadingNumbers,
    PlainRows,
    Scratch,
)
from engine.compute.attention.layer_kv import LayerKv
from engine.plan.step_records import BlockCopy, Int32, Int64

_LARGE_BYTES = 64 << 20  # worth a thread of its own to find the memory


def bytes_per_block(layers: Iterable[LayerKv], block_size: int, dtype: torch.dtype) -> int:
    """What one block of `block_size` tokens, kept in `dtype`, costs in all layers with K/V of their own."""
    widths = (
        layer.num_kv_heads * sum(_width(dim, dtype) for dim in _kept_dims(layer))
        for layer in layers
        if layer.shares is None
    )
    return sum(widths) * block_size * dtype.itemsize


def sent(numbers: Int64 | Int32, device: torch.device) -> torch.Tensor:
    """The numbers there, as they are; on the CPU the array's own memory, which is not written again."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.to(device)


def on_device(numbers: Sequence[int] | Int64, device: torch.device) -> torch.Tensor:
    """The numbers there, int64. On CUDA they go through pinned memory: the call waits for nothing."""
    host = torch.from_numpy(np.array(numbers, np.int64))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class KvTensors:
    """Keys and values of each layer as [num_blocks, num_kv_heads, block_size, dim], zeros at first.

    Heads lie outside positions, so that gathering (block, head) rows gives each head one dense run of
    positions: what a batched matrix product wants. Used on the model's thread only.

    A layer that shares another's keys and values has that one's tensors, which only the other one writes. A
    layer whose values are in its keys has one tensor for both.

    Numbers of `compute_dtype` go in and come out; `dtype` is kept: the same, or one of 8 bits as `ByteRows`
    has it. `tensor_dtype` is that of the tensors themselves: there int8, whatever the bytes mean.
    """

    def __init__(
        self,
        layers: Sequence[LayerKv],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: torch.dtype | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.compute_dtype = dtype
        self.dtype = kept or dtype
        self.tensor_dtype = torch.int8 if self.dtype in MOST_OF_BYTES else self.dtype
        self.device = device
        self.block_bytes = bytes_per_block(self.layers, block_size, self.dtype)  # of one, in all layers
        pages = HugePages(num_blocks * self.block_bytes)
        self._owners = [index for index, layer in enumerate(self.layers) if layer.shares is None]
        self.keys = self._made(pages, [layer.key_dim for layer in self.layers])
        self.values = self._made(pages, [layer.value_dim for layer in self.layers], self.keys)
        if device.type == "cpu" and num_blocks * self.block_bytes >= _LARGE_BYTES:
            fill_in_background(self.tensors)
        self._keys = self._rows(self.keys)
        self._values = [
            LeadingNumbers(keys, layer.key_dim, layer.value_dim) if layer.value_in_key else values
            for layer, keys, values in zip(self.layers, self._keys, self._rows(self.values), strict=True)
        ]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Each of them once, [num_blocks, num_kv_heads, block_size, dim]."""
        apart = [index for index in self._owners if not self.layers[index].value_in_key]
        return (*(self.keys[index] for index in self._owners), *(self.values[index] for index in apart))

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
        self._keys[layer].write(rows, key.reshape(-1, key.shape[-1]))
        self._values[layer].write(rows, value.reshape(-1, value.shape[-1]))

    def head_index(self, blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """The index that `gather` takes for `blocks` [num_sequences, max_blocks] in such a layer."""
        heads = torch.arange(num_kv_heads, device=blocks.device)
        return (blocks[:, None, :] * num_kv_heads + heads[:, None]).flatten()

    def gather(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and of the values behind `index`, good until the next call.

        Each [num_sequences * num_kv_heads * max_blocks, block_size * dim], in an order that makes a view as
        [num_sequences * num_kv_heads, positions, dim] dense.
        """
        return self._keys[layer].gather(index), self._values[layer].gather(index)

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values in `blocks` [n], each [n, num_kv_heads, block_size, dim]."""
        return self._keys[layer].read(blocks), self._values[layer].read(blocks)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer; all sources are read before any target is written."""
        if not copies:
            return
        sources = on_device([copy.source for copy in copies], self.device)
        targets = on_device([copy.target for copy in copies], self.device)
        for tensor in self.tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def move_rows(self, sources: Int64, targets: Int64) -> None:
        """Copy single slots in every layer; all sources are read before any target is written.

        Both are [n] of block * block_size + offset, on the host; the targets all differ.
        """
        if not len(sources):
            return
        slots = on_device(np.stack((sources, targets)), self.device)  # [2, n]
        by_heads: dict[int, torch.Tensor] = {}  # [2, n * num_kv_heads]
        for layer in self._owners:
            heads = self.layers[layer].num_kv_heads
            if heads not in by_heads:
                by_heads[heads] = torch.stack([self.rows_of(of, heads) for of in slots])
            source, target = by_heads[heads]
            self._keys[layer].move(source, target)
            self._values[layer].move(source, target)

    def scrub_blocks(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks in every layer, so that nothing non-finite in them reaches a later owner."""
        if not blocks:
            return
        index = on_device(blocks, self.device)
        for tensor in self.tensors:
            tensor.index_fill_(0, index, 0)

    def _made(
        self, pages: HugePages, dims: Sequence[int], keys: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """A tensor of each layer for heads of `dims`: its own, one that it shares, or that of its keys."""
        made: list[torch.Tensor] = []
        for index, (layer, dim) in enumerate(zip(self.layers, dims, strict=True)):
            if keys is not None and layer.value_in_key:
                made.append(keys[index])
            elif layer.shares is None:
                made.append(self._zeros(pages, layer.num_kv_heads, dim))
            else:
                made.append(made[layer.shares])
        return made

    def _zeros(self, pages: HugePages, num_kv_heads: int, dim: int) -> torch.Tensor:
        shape = (self.num_blocks, num_kv_heads, self.block_size, _width(dim, self.dtype))
        if self.device.type == "cpu":
            return pages.zeros(shape, self.tensor_dtype)
        return torch.zeros(shape, dtype=self.tensor_dtype, device=self.device)

    def _rows(self, tensors: Sequence[torch.Tensor]) -> list[KvRows]:
        if self.dtype in MOST_OF_BYTES:
            return [ByteRows(tensor, self.compute_dtype, self.dtype) for tensor in tensors]
        scratch = Scratch(self.dtype, self.device)
        return [PlainRows(tensor, scratch) for tensor in tensors]


def _kept_dims(layer: LayerKv) -> tuple[int, ...]:
    """How wide what is kept of a token in one of its heads is."""
    return (layer.key_dim,) if layer.value_in_key else (layer.key_dim, layer.value_dim)


def _width(dim: int, dtype: torch.dtype) -> int:
    """How many numbers of `dtype` a row of `dim` takes."""
    return dim + SCALE_BYTES if dtype in MOST_OF_BYTES else dim
