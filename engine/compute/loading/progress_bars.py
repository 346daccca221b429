"""Silence for transformers' own progress bars, which would tear up a log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn transformers' bars off inside the block; the switch is the process's, so keep the block short."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
