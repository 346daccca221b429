"""A driver of Triton for a GPU that is not there: what is launched is compiled for it, and does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_MOST_PROGRAMS = (1 << 31) - 1, 65_535, 65_535  # along each dimension of a grid
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes that a program gets, by compute capability


class _Utils:
    """What Triton asks of a device; a kernel that needs more shared memory than this is refused by it."""

    def __init__(self, capability: int) -> None:
        self._shared_memory = SHARED_MEMORY[capability]

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._shared_memory,
            "multiprocessor_count": 132,
            "max_num_regs": 65_536,
            "warpSize": 32,
        }

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024


class DryDevice:
    """Stands for Triton's driver from `install` on, and counts launches by their kernels."""

    is_active: ClassVar[Callable[[], bool]] = lambda: True

    def __init__(self, capability: int) -> None:
        self.launches: Counter[str] = Counter()
        self.utils = _Utils(capability)
        self._target = GPUTarget("cuda", capability, 32)

    def install(self) -> None:
        """Have all kernels of this process launched here; tensors are the CPU's."""
        driver.set_active(self)

    def get_current_target(self) -> Any:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, _device: int) -> None:
        pass

    def get_current_stream(self, _device: int) -> int:
        return 0

    def launcher_cls(self, _source: Any, metadata: Any) -> Callable[..., None]:
        """What a compiled kernel is launched by."""

        def launch(*given: Any) -> None:
            grid = given[:3]
            assert all(size <= most for size, most in zip(grid, _MOST_PROGRAMS, strict=True)), grid
            self.launches[metadata.name] += 1

        return launch
