"""The meta device, on which models have shapes and no numbers, without torch's kernels in Python for it.

Those replace what torch has in C++ there, and bring algebra with them, which takes half a second to import.
What C++ lacks of what most models use stands here; another model gets torch's own as soon as it needs one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_KERNELS = "torch._meta_registrations"
# What else comes with the kernels differs between torch's versions.
_KNOWN_TORCH = "2.13."


def defer_kernels() -> None:
    """Have torch imported without its kernels in Python.

    Nothing where it is there already, or is of a version for which that was not tried.
    """
    if "torch" not in sys.modules and version("torch").startswith(_KNOWN_TORCH):
        sys.meta_path.insert(0, _KernelsFinder())


def on_meta_device(compute: Callable[[], T]) -> T:
    """What `compute` gives, which uses the meta device; once more with all kernels for it where it fails.

    It must leave nothing behind when it fails. Whatever it raises then comes through.
    """
    deferred = sys.modules.get(_KERNELS)
    if not isinstance(deferred, _DeferredKernels):
        return compute()
    deferred.stand_in()
    try:
        return compute()
    except Exception:  # a model's code may do anything with a tensor
        deferred.load()
    return compute()


class _DeferredKernels(ModuleType):
    """Kernels that are loaded when something of them is asked for."""

    _ours: Any = None  # what registers ours with torch

    def stand_in(self) -> None:
        """Use ours for what C++ lacks."""
        if self._ours is not None:
            return
        from torch.library import Library

        self._ours = Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
        self._ours.impl("index_select", _index_select)
        self._ours.impl("native_layer_norm", _native_layer_norm)

    def load(self) -> ModuleType:
        """Use torch's, from now on."""
        if sys.modules.get(_KERNELS) is self:
            sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _KernelsFinder)]
            del sys.modules[_KERNELS]
        import torch._meta_registrations as kernels

        return kernels

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of each module by whoever looks at all of them
            raise AttributeError(name)
        return getattr(self.load(), name)


class _KernelsFinder(MetaPathFinder, Loader):
    """Has torch find those in place of the kernels that it asks for when it is imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """See MetaPathFinder."""
        return ModuleSpec(name, self) if name == _KERNELS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See Loader."""
        return _DeferredKernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do what else comes with torch's: without it there are no generators of random numbers."""
        from torch import _C
        from torch._opaque_base import OpaqueBaseMeta

        _C._set_generator_metaclass(OpaqueBaseMeta)


def _index_select(table: Any, dim: int, index: Any) -> Any:
    shape = list(table.shape)
    shape[dim] = index.numel()
    return table.new_empty(shape)


def _native_layer_norm(
    rows: Any, normalized_shape: Sequence[int], _weight: Any, _bias: Any, _eps: float
) -> tuple[Any, Any, Any]:
    count = len(normalized_shape)
    moments = [*rows.shape[: rows.dim() - count], *[1] * count]
    return rows.new_empty(rows.shape), rows.new_empty(moments), rows.new_empty(moments)
