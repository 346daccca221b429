"""Silence for transformers: its progress bars would tear up a log, its remarks say what is checked anyway."""

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


@contextlib.contextmanager
def no_remarks() -> Iterator[None]:
    """Hush transformers' warnings inside the block, for calls whose outcome is judged by what they return."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
