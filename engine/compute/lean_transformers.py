"""Imports transformers without what nothing here uses of it: torch's compiler and tensors over several hosts.

And torch without its kernels in Python for the meta device, of which few models need one. Together those are
1,400 of 3,400 modules, 90 MB of each process and a third of the time until a model can be loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.compute.meta_device import defer_kernels

_COMPILER = "torch._dynamo"
_MASK_MODE = f"{_COMPILER}._trace_wrapped_higher_order_op"  # of it, masking_utils imports one class by name


def prepare_transformers() -> None:
    """Leave out of what transformers imports what this module names. Results stay as they are.

    Call before anything of transformers is imported; later calls do nothing. Where it needs more than is
    left, that is loaded then.
    """
    if "transformers" in sys.modules:
        return
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER], sys.modules[_MASK_MODE] = (
            _DeferredCompiler(_COMPILER),
            _DeferredMode(_MASK_MODE),
        )
    defer_kernels()
    finder = _ImportUtilsFinder()
    sys.meta_path.insert(0, finder)
    import transformers  # not before the modules above stand in

    sys.meta_path.remove(finder)
    utils: Any = transformers.utils
    for names in (utils, utils.import_utils):  # its modules take the name from either
        names.is_torch_distributed_available = _is_distributed


class _Deferred(ModuleType):
    """A module that is loaded when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        is_package = name == "__path__" and self.__name__ == _COMPILER
        if name.startswith("__") and not is_package:  # asked of each module by whoever looks at all of them
            raise AttributeError(name)
        for deferred in (_COMPILER, _MASK_MODE):
            if isinstance(sys.modules.get(deferred), _Deferred):
                del sys.modules[deferred]
        import torch._dynamo._trace_wrapped_higher_order_op as mode  # and with it what it is a part of

        return getattr(mode if self.__name__ == _MASK_MODE else sys.modules[_COMPILER], name)


class _DeferredCompiler(_Deferred):
    """The compiler. What marks functions and tensors for it does nothing: nothing is compiled with it."""

    @staticmethod
    def disable(function: Any = None, *_: object, **__: object) -> Any:
        """As it is, or a decorator that leaves functions as they are."""
        return _as_it_is if function is None else function

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        """As it is."""
        return function

    assume_constant_result = allow_in_graph

    @staticmethod
    def mark_static_address(*_: object, **__: object) -> None:
        """Nothing."""


class _DeferredMode(_Deferred):
    """The module of one class, whose name is taken when transformers is imported and used for rare masks."""

    def TransformGetItemToIndex(self) -> Any:  # the class's own name
        """One of that class."""
        return self.__getattr__("TransformGetItemToIndex")()


def _as_it_is(function: Any) -> Any:
    return function


def _is_distributed() -> bool:
    return False


class _ImportUtilsFinder(MetaPathFinder):
    """Finds the module of transformers that reads all its files as it is imported, and hastens that."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _HasteningLoader(spec.loader)
        return spec


class _HasteningLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See Loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        self._loader.exec_module(module)
        _read_models_once(module)
        _read_names_only(module)


def _read_models_once(utils: Any) -> None:
    """Have it remember which files its models are in: it asks by folder, and then by a file in there."""
    read = utils.create_import_structure_from_path

    def read_once(path: str | Path) -> Any:
        return read(Path(path).parent if Path(path).is_file() else path)

    utils.create_import_structure_from_path = read_once


def _read_names_only(utils: Any) -> None:
    """Have it look for what a file exports where that is said, not at each line of it."""
    read = utils.fetch__all__

    def read_names(content: str) -> Any:
        return read(content[content.rfind("\n__all__") + 1 :])

    utils.fetch__all__ = read_names
