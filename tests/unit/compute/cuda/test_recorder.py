"""Waiting is refused while a recording is tried, and no longer, whatever setting that says or raises."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

from engine.compute.cuda.graphs import recorder
from tests.support.device_waits import waiting_refused


def test_the_debug_mode_is_put_back_and_its_warning_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [0]

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(RuntimeError, match="waits"), recorder._waiting_refused():
        assert modes[-1] == "error"
        raise RuntimeError("this waits")
    assert modes == [0, "error", 0]


def test_tests_may_refuse_waiting_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with waiting_refused():
        assert modes == ["error"]
    assert modes == ["error", "default"]


class PlayedStream:
    """Stands for a stream of a device; notes which it waits for."""

    def __init__(self, *_: object) -> None:
        self.waits_for: list[PlayedStream] = []

    def wait_stream(self, other: PlayedStream) -> None:
        self.waits_for.append(other)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_what_was_queued_of_work_that_cannot_be_recorded_is_waited_for(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the stream that goes on: else it would write to memory that is another's by then."""
    current, seen = PlayedStream(), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", PlayedStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)

    def work() -> None:
        seen.append(len(current.waits_for))
        if len(seen) == fails_at:
            raise RuntimeError("it waits for the device")

    made = recorder.CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="it waits"):
        made.record(work)
    assert seen == [0] * fails_at and current.waits_for == [made._stream]
