"""Which keys and values are a layer's own, where its `layer_idx` does not say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

# Attention that several layers or turns share, and which of them calls it: by its own place and its keywords.
_SHARED: dict[str, Callable[[int, Mapping[str, Any]], int]] = {
    "HrmTextAttention": lambda place, options: place + int(options.get("cycle_offset", 0)),
    "ZambaAttention": lambda _, options: int(options["layer_idx"]),
    "Zamba2Attention": lambda _, options: int(options["layer_idx"]),
}
# Attention beside layers that only read images, which are passed by where there is none.
_COUNTED = frozenset({"MllamaTextSelfAttention"})
_IN_NAME = re.compile(r"\blayers\.(\d+)\.")


def tell_layers_apart(model: nn.Module) -> None:
    """Make attention say in `layer_idx` which keys and values it writes; a second call changes nothing."""
    counted = 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _SHARED:
            module.register_forward_pre_hook(partial(_take_index, place_in(name)), with_kwargs=True)
        if kind in _COUNTED:
            module.layer_idx = counted
            counted += 1


def place_in(name: str) -> int:
    """The place of the layer that has a part called `name`."""
    found = _IN_NAME.search(name)
    assert found is not None, f"no layer's place in {name}"
    return int(found[1])


def _take_index(place: int, module: Any, _: Any, options: dict[str, Any]) -> None:
    module.layer_idx = _SHARED[type(module).__name__](place, options)
