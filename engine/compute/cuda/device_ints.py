"""DeviceInts: a step's small integer arrays in one buffer of the device."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from engine.plan.step_records import Int32

Array = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32] | NDArray[np.float64]
_KINDS = {"i4": torch.int32, "i8": torch.int64, "f4": torch.float32, "f8": torch.float64}
_ALIGNED = 32  # integers: each array begins where a vector load may


class DeviceInts:
    """Named int32 arrays of fixed shapes that are written together, in one asynchronous copy.

    Their addresses stay, so work that was recorded on the device finds what was put last. Made for one step
    or for many, then in shapes that hold the largest. Of the array called `tail`, the last one and flat, only
    what is put is sent: it may be large. Several layouts may share a `buffer`, of `size_of` the largest, if
    what one needs is put anew before it is read.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        tail: str | None = None,
        buffer: torch.Tensor | None = None,
    ) -> None:
        self._spans = _spans(shapes)
        self._tail = tail
        size = self.size_of(shapes)
        self._buffer = (
            torch.empty(size, dtype=torch.int32, device=device) if buffer is None else buffer[:size]
        )
        self.views = {name: _view(self._buffer, *span) for name, span in self._spans.items()}

    @staticmethod
    def size_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
        """How many integers a buffer for `shapes` has."""
        return sum(_room(shape) for shape in shapes.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        """One of the arrays, on the device."""
        return self.views[name]

    def put(self, arrays: Mapping[str, Int32]) -> None:
        """Write `arrays` at the beginnings of their places; what is left there becomes -1.

        On CUDA the copy is queued behind the work that the current stream has, and the call returns at once.
        Raises ValueError, before anything is sent, where one is larger than its place.
        """
        size = len(self._buffer)
        if self._tail is not None:
            size = self._spans[self._tail][0] + (len(arrays[self._tail]) if self._tail in arrays else 0)
        # Fresh memory, since an earlier copy may still be reading. Where it is pinned, torch gives none of it
        # out again before the copy that read it is over.
        staging = torch.empty(size, dtype=torch.int32, pin_memory=self._buffer.device.type == "cuda")
        staging.fill_(-1)
        numbers = staging.numpy()
        for name, array in arrays.items():
            start, room = self._spans[name]
            if any(map(operator.gt, array.shape, room)):
                raise ValueError(f"The step's {name} are {array.shape}, its place holds {room}.")
            if array.shape[1:] == room[1:]:  # one after another, as they lie
                numbers[start : start + array.size] = array.reshape(-1)
            else:
                target = numbers[start : start + math.prod(room)].reshape(room)
                target[tuple(slice(size) for size in array.shape)] = array
        self._buffer[:size].copy_(staging, non_blocking=True)


def send(arrays: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
    """New tensors of these numbers and shapes on `device`, in one asynchronous copy; see DeviceInts.put."""
    words = {name: np.ascontiguousarray(array).view(np.int32) for name, array in arrays.items()}
    ints = DeviceInts({name: array.shape for name, array in words.items()}, device)
    ints.put(words)
    return {name: ints[name].view(_KINDS[array.dtype.str[1:]]) for name, array in arrays.items()}


def _spans(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where each array begins, and its shape."""
    starts = itertools.accumulate((_room(shape) for shape in shapes.values()), initial=0)
    return {name: (start, shape) for start, (name, shape) in zip(starts, shapes.items(), strict=False)}


def _room(shape: tuple[int, ...]) -> int:
    return -(-max(math.prod(shape), 1) // _ALIGNED) * _ALIGNED


def _view(buffer: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[start : start + math.prod(shape)].view(shape)
