"""The compiled kernels for tests, where this machine can have them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.model.native.compiler import NativeUnavailable, check_cpu, find_compiler, library
from engine.model.native.drawing import NativeDraw
from engine.model.native.kernels import NativeKernels


@cache
def _compiled() -> tuple[NativeKernels, NativeDraw]:
    with TemporaryDirectory() as home:
        made = library(Path(home))
        return NativeKernels(made), NativeDraw(made)


def compiled_kernels() -> NativeKernels:
    """The kernels, compiled once a process; skips the test with the reason where no machine could have them.

    Source that does not compile fails it.
    """
    try:
        check_cpu()
        find_compiler()
    except NativeUnavailable as reason:
        pytest.skip(f"compiled kernels: {reason}")
    return _compiled()[0]


def compiled_draw() -> NativeDraw:
    """As `compiled_kernels`, for draws."""
    compiled_kernels()
    return _compiled()[1]
