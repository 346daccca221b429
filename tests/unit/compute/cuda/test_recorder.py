"""Waiting is refused while a recording is tried, and no longer, whatever setting that says or raises."""

from __future__ import annotations

import warnings

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
