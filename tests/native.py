"""The compiled kernels for tests, where this machine can have them."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest

from engine.model.native.compiler import NativeUnavailable, library
from engine.model.native.kernels import NativeKernels


@cache
def compiled_home() -> Path:
    """A home with the kernels in it, compiled once a process; skips the test where they cannot be had."""
    home = Path(mkdtemp())
    atexit.register(rmtree, home, ignore_errors=True)
    try:
        library(home)
    except NativeUnavailable as reason:
        pytest.skip(f"compiled kernels: {reason}")
    return home


@cache
def compiled_kernels() -> NativeKernels:
    """The kernels, loaded once a process; skips the test with the reason where they cannot be had."""
    try:
        return NativeKernels(library(compiled_home()))
    except NativeUnavailable as reason:
        pytest.skip(f"compiled kernels: {reason}")
