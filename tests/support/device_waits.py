"""What a test of a GPU asks of its host: that it does not wait for the device. On a CPU it is played."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Whose answer, or whose shape, is only known when the device has come to it.
_WAITING = frozenset(
    (
        *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"),
        *("_unique2", "unique_dim", "unique_consecutive", "bincount"),
    )
)
_INDEXING = frozenset(("index", "index_put", "index_put_"))  # by masks, whose places have to be counted


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Have each operation that would wait for the device raise RuntimeError instead."""
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode("default")


def _set_mode(mode: str) -> None:
    """Set it without the warning of a process's first time, which is an error in tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


class WaitingRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On a CPU: has operations that on a device would be waited for raise, while it is the current mode."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = [each for each in args[1] if _is_mask(each)] if name in _INDEXING else []
        if name in _WAITING or masks or (name == "repeat_interleave" and not _has_size(args, kwargs)):
            raise RuntimeError(f"the host would wait for the device: {name}")
        return func(*args, **kwargs or {})


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _has_size(args: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a `repeat_interleave` says how long it will be."""
    counts = args[1] if len(args) > 1 else args[0]
    return not isinstance(counts, torch.Tensor) or (kwargs or {}).get("output_size") is not None
