"""Recorder: work on the device that is put down once and from then on done again at a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Recorder(Protocol):
    """A way to record work whose every address and shape stays the same."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does `work` again in the stream that is current then; it may be carried out meanwhile.

        Raises what keeps it from being recorded; the device is as usable as before.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: no two of them may be at work at a time.

    Temporaries of one graph lie where another has its own, so record the largest work first, and keep what
    is to outlive the work in memory of your own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Recorder. Work that waits for the device is refused before anything is recorded."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()  # compiles and loads kernels, and has libraries take their memory for this stream
                with _waiting_refused():
                    work()
        finally:  # what it works in may be let go of, and be another's next
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # The outer context brings the current stream back where the inner one fails at its end. Other threads
        # may use the device meanwhile: only what this one does can spoil the recording.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Have every operation that waits for the device raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    """Set it without its warning, which says once that not every wait is noticed, and may be an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
