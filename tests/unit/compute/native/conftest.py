"""The compiled kernels in bfloat16, on more threads than one."""

from __future__ import annotations

import pytest

from engine.compute.native.kernels import NativeKernels
from tests.support.native import compiled_kernels


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    """In bfloat16."""
    return compiled_kernels()


@pytest.fixture
def two_threads(kernels: NativeKernels) -> None:
    """More than one, for every loop to be shared out."""
    kernels.team.resize(2)
