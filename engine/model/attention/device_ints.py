"""DeviceInts: a step's small integer arrays in one buffer of the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.outputs import Int32

_ALIGNED = 32  # integers: each array begins where a vector load may


class DeviceInts:
    """Named int32 arrays of fixed shapes that are written together, in one copy that nobody waits for.

    Their addresses stay, so work that was recorded on the device finds what was put last. Made for one step
    or for many, then in shapes that hold the largest.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._spans: dict[str, tuple[int, tuple[int, ...]]] = {}
        size = 0
        for name, shape in shapes.items():
            self._spans[name] = size, shape
            size += -(-max(int(np.prod(shape)), 1) // _ALIGNED) * _ALIGNED
        self._buffer = torch.empty(size, dtype=torch.int32, device=device)
        self._views = {name: _view(self._buffer, *span) for name, span in self._spans.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """One of the arrays, on the device."""
        return self._views[name]

    def put(self, arrays: Mapping[str, Int32]) -> None:
        """Write `arrays` at the beginnings of their places; what is left there becomes -1.

        On CUDA the copy is queued behind the work that the current stream has, and the call returns at once.
        Raises ValueError, before anything is written, where one is larger than its place.
        """
        for name, array in arrays.items():
            room = self._spans[name][1]
            if any(size > most for size, most in zip(array.shape, room, strict=True)):
                raise ValueError(f"The step's {name} are {array.shape}, its place holds {room}.")
        pinned = self._buffer.device.type == "cuda"  # a fresh one, since an earlier copy may still be reading
        staging = torch.empty(len(self._buffer), dtype=torch.int32, pin_memory=pinned)
        staging.fill_(-1)
        for name, array in arrays.items():
            target = _view(staging, *self._spans[name]).numpy()
            target[tuple(slice(size) for size in array.shape)] = array
        self._buffer.copy_(staging, non_blocking=True)


def _view(buffer: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return buffer[start : start + int(np.prod(shape))].view(shape)
