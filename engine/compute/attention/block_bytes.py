"""BlockBytes: whole K/V blocks as plain bytes, moved by a thread that is not the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.swap_tensors import SwapTensors
from engine.compute.runner.device import in_stream
from engine.plan.step_records import BlockCopy

_STAGED = 16  # blocks of a call, where they go through memory of their own
_IN_PLACE = 64  # of one that needs none: two threads that share a call wait for each other at its end


class BlockBytes(Protocol):
    """Where the bytes of blocks are read and written; each block in pieces, always the same ones.

    For one thread of its own, beside the model's. The blocks of a call are no step's: nobody writes them
    meanwhile, or it is found out afterwards, and nobody reads what is put into them.
    """

    batch: int  # the most blocks of one call
    block_bytes: int  # of all pieces of a block together

    def outgoing(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """What each of these blocks holds; good until the next call."""

    def incoming(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """Where to put what each of these blocks is to hold; `accept` must follow."""

    def accept(self, block_ids: Sequence[int]) -> None:
        """What was put there is theirs now; the blocks are those of the last `incoming`, or the first."""


def block_bytes_of(kv: KvTensors) -> BlockBytes:
    """The bytes of the blocks of `kv`, on whichever device it is."""
    return HostBlockBytes(kv) if kv.device.type == "cpu" else DeviceBlockBytes(kv)


class HostBlockBytes:
    """Blocks in host memory: a piece is a layer's keys or values, in their place."""

    def __init__(self, kv: KvTensors) -> None:
        self.batch = _IN_PLACE
        rows = [tensor.flatten(1).view(torch.uint8).numpy() for tensor in kv.tensors]
        self._layers = [(row.data.cast("B"), row.shape[1]) for row in rows]  # and bytes of a block
        self.block_bytes = sum(width for _, width in self._layers)

    def outgoing(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """See BlockBytes."""
        return [
            [layer[block_id * width : (block_id + 1) * width] for layer, width in self._layers]
            for block_id in block_ids
        ]

    incoming = outgoing

    def accept(self, block_ids: Sequence[int]) -> None:
        """Nothing is left to do."""


class DeviceBlockBytes:
    """Blocks on a GPU: they go through pinned host memory, on a stream beside the model's."""

    def __init__(self, kv: KvTensors) -> None:
        self.batch = _STAGED
        self._outgoing, self._incoming = SwapTensors(kv, _STAGED), SwapTensors(kv, _STAGED)
        self._rows = {staging: staging.rows(range(_STAGED)) for staging in (self._outgoing, self._incoming)}
        self.block_bytes = len(self._rows[self._outgoing][0])
        self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def outgoing(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """See BlockBytes."""
        with torch.inference_mode(), in_stream(self._stream):
            self._outgoing.copy_out([BlockCopy(block_id, i) for i, block_id in enumerate(block_ids)])
        self._stream.synchronize()
        return [[row] for row in self._rows[self._outgoing][: len(block_ids)]]

    def incoming(self, block_ids: Sequence[int]) -> Sequence[Sequence[memoryview]]:
        """See BlockBytes."""
        return [[row] for row in self._rows[self._incoming][: len(block_ids)]]

    def accept(self, block_ids: Sequence[int]) -> None:
        """Copy them from the host's memory to the device."""
        with torch.inference_mode(), in_stream(self._stream):
            self._incoming.copy_in([BlockCopy(i, block_id) for i, block_id in enumerate(block_ids)])
        self._stream.synchronize()
