"""How many launches a piece of a model would take on a device, counted on a CPU without carrying them out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What takes memory or looks at it anew, and what asks nothing of a device.
_FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "_unsafe_view",
    "detach",
    "alias",
    "lift_fresh",
    "_local_scalar_dense",
)


class LaunchCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch that are no views, while it is the current mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        output = func(*args, **kwargs or {})
        if name not in _FREE and not (func.is_view and _is_same(output, args[0])):
            self.names.append(name)
        return output


def _is_same(output: Any, given: Any) -> bool:
    """Whether what may be a view, as `to` and `contiguous` give it, is one."""
    if not isinstance(output, torch.Tensor):
        return True
    return bool(output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr())


class CountedKernel:
    """In place of a Triton kernel: each launch is counted, and computes nothing."""

    def __init__(self, name: str, count: LaunchCount) -> None:
        self._name = name
        self._count = count

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self._count.names.append(self._name)


def run_counted(count: LaunchCount, work: Any) -> list[str]:
    """The launches of `work`, in order."""
    count.names.clear()
    with torch.inference_mode(), count:
        work()
    return list(count.names)
