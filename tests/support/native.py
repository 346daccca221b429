"""The compiled kernels for tests, where this machine can have them."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest

from engine.compute.native.compiler import NativeUnavailable, check_cpu, find_compiler, library
from engine.compute.native.drawing import NativeDraw
from engine.compute.native.kernels import NativeKernels


@cache
def _compiled() -> Path:
    home = Path(mkdtemp())
    atexit.register(rmtree, home, ignore_errors=True)
    library(home)
    return home


def compiled_home() -> Path:
    """A home with the kernels in it, compiled once a process.

    Skips the test with the reason where no machine like this could have them; source that does not compile
    fails it.
    """
    try:
        check_cpu()
        find_compiler()
    except NativeUnavailable as reason:
        pytest.skip(f"compiled kernels: {reason}")
    return _compiled()


@cache
def _loaded() -> NativeKernels:
    return NativeKernels(library(compiled_home()))


def compiled_kernels() -> NativeKernels:
    """The kernels, loaded once a process; as `compiled_home`."""
    compiled_home()
    return _loaded()


def compiled_draw() -> NativeDraw:
    """What draws rows; as `compiled_home`."""
    return NativeDraw(library(compiled_home()))
