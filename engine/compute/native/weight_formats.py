"""What a loaded model's weights are kept in, and how much memory each format takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from gguf import GGMLQuantizationType
from torch import nn

from engine.compute.loading.coded_weights import CodedLinear
from engine.compute.loading.stored_weights import Stored, StoredEmbedding, StoredExperts, StoredLinear
from engine.compute.native.block_panels import F8_E4M3, PLAIN
from engine.compute.native.modules import NativeEmbedding, NativeLinear
from engine.compute.native.packed_weights import PackedWeights

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int8: "INT8"}


def weight_bytes_by_format(model: nn.Module) -> dict[str, int]:
    """Bytes of weights in each format, by the name that files give it, most first. Shared ones count once."""
    count: Counter[str] = Counter()
    found = {place: (name, size) for place, name, size in _weights(model) if size}
    for name, size in found.values():
        count[name] += size
    return dict(count.most_common())


def _weights(model: nn.Module) -> Iterator[tuple[int, str, int]]:
    """Of each piece of memory its address, its format and its size."""
    for parameter in model.parameters():
        yield _tensor(parameter)
    for module in model.modules():
        if isinstance(module, NativeLinear | NativeEmbedding):
            yield from _packed(module.weights)
        elif isinstance(module, StoredLinear | StoredEmbedding):
            yield _stored(module.stored)
        elif isinstance(module, StoredExperts):
            yield from map(_stored, module.stored.pieces)
        elif isinstance(module, CodedLinear):
            coded = module.coded
            yield from ((each.data_ptr(), coded.kind.value, each.nbytes) for each in coded.tensors)


def _stored(weight: Stored) -> tuple[int, str, int]:
    return weight.place, weight.name, weight.nbytes


def _packed(weights: PackedWeights) -> Iterator[tuple[int, str, int]]:
    if weights.bias is not None:
        yield _tensor(weights.bias)
    if not weights.parts:
        yield _tensor(weights.packed)
    for part in weights.parts:
        place, name, size = _tensor(part.panels)
        yield place, name if part.format == PLAIN else _format_name(part.format), size


def _format_name(number: int) -> str:
    return "F8_E4M3" if number == F8_E4M3 else GGMLQuantizationType(number).name


def _tensor(tensor: torch.Tensor) -> tuple[int, str, int]:
    name = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return tensor.data_ptr(), name, tensor.nbytes
