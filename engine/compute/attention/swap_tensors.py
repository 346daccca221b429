"""SwapTensors: whole K/V blocks kept in host memory while their requests are preempted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from engine.compute.attention.kv_tensors import KvTensors, on_device
from engine.plan.step_records import BlockCopy

log = logging.getLogger("slipstream.model")

_SEGMENT_BYTES = 64 << 20  # how much host memory is taken at a time: pinning that much costs milliseconds
_STAGING_BYTES = 16 << 20  # how much device memory a swap may need beside the K/V itself


class SwapTensors:
    """Room in host memory for `num_blocks` blocks of `kv`: one row a block, all its layers side by side.

    So a block is moved in one transfer, and successive host blocks in one together. Memory is taken when a
    block of its segment is first reserved, so unused room costs nothing. On CUDA it is pinned, and
    the first segment is there from the start: few servers ever need a second.

    Transfers are queued on the current stream, in the order of the calls, and not waited for.
    Used on the model's thread only.
    """

    def __init__(self, kv: KvTensors, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._kv = kv
        self._widths = [tensor[0].numel() for tensor in kv.tensors]  # of each layer's keys, of each's values
        self._width = sum(self._widths)
        self._batch = max(1, _STAGING_BYTES // kv.block_bytes)
        self._segment = max(1, _SEGMENT_BYTES // kv.block_bytes)  # blocks
        self._segments: dict[int, torch.Tensor] = {}  # each [blocks, numbers of a block]
        if kv.device.type == "cuda" and num_blocks:
            self.reserve([0])

    @property
    def reserved_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(segment.nbytes for segment in self._segments.values())

    def reserve(self, blocks: Iterable[int]) -> None:
        """Take the memory of these host blocks, where that has not been done."""
        for index in {block // self._segment for block in blocks} - self._segments.keys():
            num_blocks = min(self._segment, self.num_blocks - index * self._segment)
            assert num_blocks > 0, f"a block of host segment {index} is none of the {self.num_blocks}"
            self._segments[index] = self._allocate(num_blocks)

    def rows(self, blocks: Iterable[int]) -> list[memoryview]:
        """The bytes of these host blocks, in their place; their memory is taken."""
        self.reserve(blocks)
        places = (divmod(block, self._segment) for block in blocks)
        return [self._segments[i][row].view(torch.uint8).numpy().data for i, row in places]

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Save device blocks, the sources, in host blocks, the targets, which are reserved."""
        for batch in self._batches(copies):
            sources = on_device([copy.source for copy in batch], self._kv.device)
            parts = [tensor.flatten(1).index_select(0, sources) for tensor in self._kv.tensors]
            staging = torch.cat(parts, dim=1)  # [batch, numbers of a block]
            for run in self._runs([copy.target for copy in batch]):
                run.host.copy_(staging[run.rows], non_blocking=True)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Bring host blocks, the sources, which `copy_out` wrote, back into device blocks, the targets."""
        for batch in self._batches(copies):
            staging = torch.empty(
                (len(batch), self._width), dtype=self._kv.tensor_dtype, device=self._kv.device
            )  # [batch, numbers of a block]
            for run in self._runs([copy.source for copy in batch]):
                staging[run.rows].copy_(run.host, non_blocking=True)
            targets = on_device([copy.target for copy in batch], self._kv.device)
            for tensor, part in zip(self._kv.tensors, torch.split(staging, self._widths, dim=1), strict=True):
                tensor.flatten(1).index_copy_(0, targets, part)

    def _batches(self, copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
        for first in range(0, len(copies), self._batch):
            yield copies[first : first + self._batch]

    def _runs(self, blocks: Sequence[int]) -> Iterator[_Run]:
        """`blocks` cut into the longest pieces that lie one after another in one segment."""
        first = 0
        for last, block in enumerate(blocks):
            following = blocks[last + 1] if last + 1 < len(blocks) else -1
            if following == block + 1 and following % self._segment:
                continue
            segment, end = divmod(block, self._segment)
            rows = slice(first, last + 1)
            yield _Run(rows, self._segments[segment][end - (last - first) : end + 1])
            first = last + 1

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        shape, dtype = (num_blocks, self._width), self._kv.tensor_dtype
        if self._kv.device.type == "cuda":
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:  # a limit on locked memory: slower, still right
                log.warning("no pinned host memory for swapping (%s); using ordinary memory", error)
        return torch.empty(shape, dtype=dtype)


class _Run(NamedTuple):
    """Rows of a batch and the host blocks they go to or come from."""

    rows: slice
    host: torch.Tensor  # [rows, numbers of a block]
