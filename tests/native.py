"""The compiled kernels for tests, where this machine can have them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.model.native.compiler import NativeUnavailable, library
from engine.model.native.kernels import NativeKernels


@cache
def compiled_kernels() -> NativeKernels:
    """The kernels, compiled once a process; skips the test with the reason where they cannot be had."""
    try:
        with TemporaryDirectory() as home:
            return NativeKernels(library(Path(home)))
    except NativeUnavailable as reason:
        pytest.skip(f"compiled kernels: {reason}")
