"""HugePages: memory for what every step reads all over, in pages of 2 MiB where the system has them.

A page of 4 KiB is looked up for every 4 KiB read; scattered reads then wait for the looking up.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from threading import Thread
from typing import NamedTuple

import torch

PAGE_BYTES = 2 << 20
_ALIGNMENT = 64  # bytes: a line of the cache

_POPULATE_WRITE = 23  # Linux' MADV_POPULATE_WRITE; other systems do not know the number


class HugePages:
    """Hands out tensors on the CPU, zeros at first, from regions of `region_bytes` or as much as one needs.

    A region is given back with the last of its tensors. For one thread.
    """

    def __init__(self, region_bytes: int) -> None:
        self._region_bytes = region_bytes
        self._region = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor. Raises MemoryError."""
        num_bytes = prod(shape) * dtype.itemsize
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._region) < taken:
            self._region = _map(max(taken, self._region_bytes))
        given, self._region = self._region[:num_bytes], self._region[taken:]
        return given.view(dtype).view(*shape)


def fill_in_background(tensors: Sequence[torch.Tensor]) -> Thread:
    """Have the system find the pages behind contiguous `tensors` now, in the thread returned.

    The first of each come first. Else each is found when it is first written to, while a request waits.
    Changes no number; where the system cannot, nothing happens. Memory that nobody holds any more is not
    held by this, nor filled.
    """
    places = [_Place(weakref.ref(tensor), tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    thread = Thread(target=_fill, args=(places,), name="fill-memory", daemon=True)
    thread.start()
    return thread


class _Place(NamedTuple):
    """Where a tensor lies for as long as it is there."""

    tensor: weakref.ref[torch.Tensor]
    start: int
    num_bytes: int


def _fill(places: Sequence[_Place]) -> None:
    madvise = getattr(ctypes.CDLL(None), "madvise", None)  # through ctypes: it lets other threads run
    if madvise is None:
        return
    with suppress(OSError, AttributeError):  # run only on an idle CPU, where the system can do so
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for place, first, stop in _in_order_of_use(places):
        held = place.tensor()  # for this one call: an engine that has stopped gives its memory back at once
        if held is None or madvise(first, stop - first, _POPULATE_WRITE):
            return
        del held


def _in_order_of_use(places: Sequence[_Place]) -> Iterator[tuple[_Place, int, int]]:
    """The addresses of a huge page of every tensor, then of the next of every tensor, up to their ends."""
    for offset in range(0, max((place.num_bytes for place in places), default=0), PAGE_BYTES):
        for place in places:
            first = place.start - place.start % mmap.PAGESIZE + offset
            stop = min(first + PAGE_BYTES, place.start + place.num_bytes)
            if first < stop:
                yield place, first, stop


def _map(num_bytes: int) -> torch.Tensor:
    """Fresh bytes [num_bytes], which lie in huge pages if they fill any."""
    spare = PAGE_BYTES if num_bytes >= PAGE_BYTES else 0
    try:
        mapped = mmap.mmap(-1, max(1, num_bytes + spare), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error.strerror}") from error
    region = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping
    if not spare:
        return region[:num_bytes]
    with suppress(OSError, AttributeError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    first = -region.data_ptr() % PAGE_BYTES
    return region[first : first + num_bytes]
