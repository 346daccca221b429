"""A model whose weights stay as a GGUF file stores them; what belongs to it as text is kept in a directory.

The directory has config.json, the tokenizer and gguf.json, which names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Format
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.compute import attention
from engine.compute.attention.own_attention import built_with
from engine.compute.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.compute.loading.gguf_names import EXPERTS, TensorPlaces
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.model_files import GGUF_FILE, first_line
from engine.compute.loading.stored_weights import (
    ExpertWeights,
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    StoredWeight,
)
from engine.compute.loading.support import find_model_class
from engine.compute.native.families import has_read_experts
from engine.errors import StartRefused, UnsupportedModel

BLOCK_FORMATS = frozenset(
    {
        *(Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1, Format.Q8_0),
        *(Format.Q2_K, Format.Q3_K, Format.Q4_K, Format.Q5_K, Format.Q6_K),
        *(Format.IQ4_NL, Format.IQ4_XS, Format.MXFP4),
    }
)
_PLAIN_FORMATS = frozenset({Format.F32, Format.F16, Format.BF16})


def has_blocks(file: GgufFile) -> bool:
    """True for a file whose matrices and experts are plain numbers or multiplied as they are stored."""
    kinds = {tensor.quantization for tensor in file.tensors}
    are_known = all(
        tensor.blocks.ndim <= 2 or EXPERTS.fullmatch(tensor.name)
        for tensor in file.tensors
        if tensor.quantization in BLOCK_FORMATS
    )
    return bool(kinds & BLOCK_FORMATS) and kinds <= BLOCK_FORMATS | _PLAIN_FORMATS and are_known


def name_file(directory: Path, source: Path) -> None:
    """Write into `directory` that the weights are in the file `source`."""
    staged = directory / f".{GGUF_FILE}.{os.getpid()}"
    staged.write_text(json.dumps({"file": str(source.resolve())}), encoding="utf-8")
    os.replace(staged, directory / GGUF_FILE)


def load_gguf_model(source: Path, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model on the CPU under our attention, with matrices as stored and all else in `dtype`.

    Raises StartRefused for a file that does not fill it.
    """
    attention.register()
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=built_with(find_model_class(config), attention.ATTENTION_NAME),
        )
    try:
        _fill(model, read_gguf(source), dtype)
    except StartRefused:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise StartRefused(f"{source} cannot be loaded: {first_line(error)}.") from error
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise StartRefused(f"{source} is incomplete: it holds no {missing[0]} (of {len(missing)} missing).")
    model.config.use_cache = False
    return model.eval().requires_grad_(False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have modules made here have no memory for their parameters; their buffers are computed."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fill(model: Any, file: GgufFile, dtype: torch.dtype) -> None:
    """Put every tensor of the file where it belongs."""
    _, settings = read_gguf_config(file)
    places = TensorPlaces(model, str(file.values["general.architecture"]), settings)
    stored: dict[str, StoredWeight] = {}
    experts: dict[str, dict[str, StoredWeight]] = {}
    for tensor in file.tensors:
        name = places.place(tensor.name)
        if name is None:
            continue
        if found := EXPERTS.fullmatch(tensor.name):
            experts.setdefault(name.rpartition(".")[0], {})[found["part"]] = _stored_experts(tensor)
        elif tensor.quantization in BLOCK_FORMATS and places.is_row_by_row(tensor.name):
            stored[name] = _stored(tensor, places)
        else:
            _set_parameter(model, name, places.values(tensor.name, tensor.values()).to(dtype))
    _tie(model, stored)
    for name, weight in stored.items():
        _put_module(model, name.removesuffix(".weight"), weight, dtype)
    for name, parts in experts.items():
        _put_experts(model, name, parts)


def _stored(tensor: GgufTensor, places: TensorPlaces) -> StoredWeight:
    """The tensor with its rows in the model's order."""
    rows = len(tensor.blocks)
    numbers = np.arange(rows)[:, None]
    order = places.values(tensor.name, numbers).numpy()
    if order.shape != numbers.shape or not np.array_equal(np.sort(order, axis=0), numbers):
        raise UnsupportedModel(f"The GGUF tensor {tensor.name} is not stored row by row.")
    kept = None if np.array_equal(order, numbers) else np.ascontiguousarray(order[:, 0])
    return StoredWeight(tensor.quantization, tensor.blocks, rows, tensor.num_columns, kept)


def _stored_experts(tensor: GgufTensor) -> StoredWeight:
    """The outputs of all experts of a layer, [experts, out, in], one expert's behind the other's."""
    blocks = tensor.blocks.reshape(-1, tensor.blocks.shape[-1])
    return StoredWeight(tensor.quantization, blocks, len(blocks), tensor.num_columns)


def _put_experts(model: Any, name: str, parts: dict[str, StoredWeight]) -> None:
    """Stored weights in place of those of the experts `name`; what is incomplete is left empty."""
    before = model.get_submodule(name)
    if not has_read_experts(before):
        raise UnsupportedModel(f"The GGUF tensors of {name} have no place in a {type(before).__name__}.")
    if parts.keys() < {"gate", "up", "down"}:
        return
    pieces = ((parts[part],) for part in ("gate", "up", "down"))
    weights = ExpertWeights(len(before.down_proj), *pieces)
    if not weights.fits(before):
        raise ValueError(f"its {name} are of other sizes")
    model.set_submodule(name, StoredExperts(weights, before.act_fn))


def _tie(model: Any, stored: dict[str, StoredWeight]) -> None:
    """Where the file has no head of its own, the embedding is it."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    head_name, embedding_name = names[id(head)], names[id(embedding)]
    if head_name in stored or not head.weight.is_meta:
        return
    if embedding_name in stored:
        stored[head_name] = stored[embedding_name]
    else:
        head.weight = embedding.weight


def _put_module(model: Any, name: str, weight: StoredWeight, dtype: torch.dtype) -> None:
    """Stored weights in place of the module `name`'s own."""
    before = model.get_submodule(name)
    if tuple(before.weight.shape) != (weight.out, weight.in_features):
        raise ValueError(f"its {name} is [{weight.out}, {weight.in_features}]")
    if isinstance(before, nn.Embedding):
        scale = getattr(before, "scalar_embed_scale", None)
        made: nn.Module = StoredEmbedding(weight, dtype, scale)
    elif type(before) is nn.Linear:
        made = StoredLinear(weight, None if before.bias is None else before.bias.detach())
    else:
        raise UnsupportedModel(f"The GGUF tensor of {name} is in blocks, and its module is no projection.")
    model.set_submodule(name, made)


def _set_parameter(model: Any, name: str, values: torch.Tensor) -> None:
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(parent)
    if module._parameters[own].shape != values.shape:
        raise ValueError(f"its {name} is {list(values.shape)}")
    module._parameters[own] = nn.Parameter(values, requires_grad=False)
