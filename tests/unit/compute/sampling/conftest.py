"""Torch on one thread for the sampling tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def single_threaded(one_thread: None) -> None:
    """Small tensors gain nothing from torch's threads and lose much where other tests run beside."""
