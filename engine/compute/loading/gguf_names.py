"""Which tensor of a GGUF file is which weight of a model, by transformers' tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map


def tensor_names(model: Any, processor: TensorProcessor) -> dict[str, str]:
    """The name in the model of each tensor that a GGUF file may have."""
    names: dict[str, str] = get_gguf_hf_weights_map(_NamedWeights(model, depth=1), processor)
    return names


class _NamedWeights:
    """The part of a module that the name table looks at, only `depth` levels deep.

    Given the module itself it would build one table for each of the hundreds of submodules.
    """

    def __init__(self, module: Any, depth: int) -> None:
        self._module = module
        self._depth = depth
        self.config = getattr(module, "config", None)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, on the meta device."""
        weights: dict[str, Tensor] = self._module.state_dict()
        return weights

    def named_children(self) -> Iterator[tuple[str, _NamedWeights]]:
        """The direct children, if they are to be looked at."""
        if self._depth:
            for name, child in self._module.named_children():
                yield name, _NamedWeights(child, self._depth - 1)
