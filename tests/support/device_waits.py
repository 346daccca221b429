"""What a test of a GPU asks of its host: that it does not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Have each operation that would wait for the device raise RuntimeError instead."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
