"""TensorPlaces: which tensor of a GGUF file is which weight of a model, and what its numbers are there.

By transformers' tables, of which it has two kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import GGUF_ARCHS
from transformers.integrations.gguf.gguf_conversion_mapping import Concatenate, PermuteInputFeatures
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    Qwen2MoeTensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from engine.compute.loading.gguf_settings import ROPE_FACTORS
from engine.errors import UnsupportedModel

# All experts of a layer, [experts, out, in].
EXPERTS = re.compile(r"(?P<stem>blk\.\d+\.ffn_(?P<part>gate|up|down)_exps)\.weight")
# What transformers' table lacks: llama.cpp stores these as those that the processors are named for.
_PROCESSORS: dict[str, type[TensorProcessor]] = {
    "gemma": Gemma2TensorProcessor,
    "granite": LlamaTensorProcessor,
    "olmoe": Qwen2MoeTensorProcessor,
    "smollm3": LlamaTensorProcessor,
}


_MTP = "mtp."  # a module for drafts, which transformers' models do not have


class TensorPlaces:
    """Where the tensors of a file of some architecture belong in the model that is made of it."""

    def __init__(self, model: Any, architecture: str, settings: Mapping[str, Any]) -> None:
        """`settings` are the file's, as transformers' processors want to see them."""
        self._model_name = type(model).__name__
        self._known = frozenset(model.state_dict())
        self._table: _Table = (
            _Conversions(architecture, model.config)
            if architecture in GGUF_ARCHS
            else _Processed(model, architecture, settings)
        )

    def place(self, tensor: str) -> str | None:
        """The parameter that the tensor of this name is, or is a part of; None for what is not needed.

        Raises UnsupportedModel for one that the model should have.
        """
        if tensor == ROPE_FACTORS:
            return None
        name = self._table.name(tensor)
        if name is not None and name.startswith(_MTP):
            return None
        if name not in self._known:
            raise UnsupportedModel(f"The GGUF tensor {tensor} has no place in {self._model_name}.")
        return name

    def is_row_by_row(self, tensor: str) -> bool:
        """Whether each row of the parameter is a row of the tensor."""
        return self._table.is_row_by_row(tensor)

    def values(self, tensor: str, numbers: NDArray[Any]) -> Tensor:
        """The tensor's numbers as the model has them; of experts, one part of theirs."""
        return self._table.values(tensor, numbers)


class _Table(Protocol):
    def name(self, tensor: str) -> str | None: ...
    def is_row_by_row(self, tensor: str) -> bool: ...
    def values(self, tensor: str, numbers: NDArray[Any]) -> Tensor: ...


class _Processed:
    """By the tables of llama.cpp's names, and a processor for an architecture's numbers."""

    def __init__(self, model: Any, architecture: str, settings: Mapping[str, Any]) -> None:
        kind = _PROCESSORS.get(architecture) or TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor = kind(config=dict(settings))
        self._names: dict[str, str] = get_gguf_hf_weights_map(_NamedWeights(model, depth=1), self._processor)

    def name(self, tensor: str) -> str | None:
        experts = EXPERTS.fullmatch(tensor)
        return self._names.get(tensor if experts is None else experts["stem"])

    def is_row_by_row(self, tensor: str) -> bool:
        return True

    def values(self, tensor: str, numbers: NDArray[Any]) -> Tensor:
        processed: NDArray[Any] = self._processor.process(weights=numbers, name=tensor).weights
        return torch.tensor(np.ascontiguousarray(processed))  # a copy: the file's memory is read-only


class _Conversions:
    """By the renamings and conversions that transformers lists for an architecture."""

    def __init__(self, architecture: str, config: Any) -> None:
        transforms = GGUF_ARCHS[architecture](config)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def name(self, tensor: str) -> str | None:
        name: str = rename_source_key(tensor, self._renamings, self._converters)[0]
        return name

    def is_row_by_row(self, tensor: str) -> bool:
        return not any(isinstance(each, PermuteInputFeatures) for each in self._operations(tensor))

    def values(self, tensor: str, numbers: NDArray[Any]) -> Tensor:
        found = torch.from_numpy(np.array(numbers))  # a copy: the file's memory is read-only
        for operation in self._operations(tensor):
            (found,) = operation.convert({tensor: [found]}, [tensor], [tensor]).values()
        return found

    def _operations(self, tensor: str) -> list[Any]:
        """Those on the tensor alone."""
        _, pattern = rename_source_key(tensor, self._renamings, self._converters)
        found = (each.operations for each in self._converters if pattern in each.source_patterns)
        return [each for each in next(found, []) if not isinstance(each, Concatenate)]


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
