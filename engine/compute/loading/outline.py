"""A model without its weights: everything that sizing needs, in a second and hardly any memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from config import ModelSettings
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.gguf_file import read_gguf
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.loader import (
    LoadedModel,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    may_use_kernels,
    stored_dtype,
)
from engine.compute.loading.locate import FoundModel
from engine.compute.loading.model_files import first_line
from engine.compute.loading.support import Architecture, check_supported, find_model_class, read_architecture
from engine.compute.recurrent.slot_mixers import read_layer_states
from engine.errors import StartRefused

_NAME = "slipstream-outline"
_NUM_TOKENS = 2
_CONVERTED_DTYPE = torch.bfloat16


class NoOutline(Exception):
    """The architecture cannot be run without numbers; only loading it tells what it needs."""


def read_stored(found: FoundModel) -> tuple[Architecture, torch.dtype] | None:
    """The architecture of a model and the dtype of its weights; None when nothing of it is here yet.

    Raises StartRefused for one that cannot be served.
    """
    if found.directory is not None:
        architecture = read_architecture(found.directory)
        if found.pending is not None:  # no weights to look at
            named = architecture.text_config.dtype
            return architecture, named if isinstance(named, torch.dtype) else torch.float32
        return architecture, stored_dtype(found.directory, architecture.text_config)
    if found.gguf is not None:
        config = _read_gguf_config(found.gguf)
        architecture = Architecture(config, find_model_class(config))
        check_supported(architecture)
        return architecture, _CONVERTED_DTYPE
    return None


def outline_model(architecture: Architecture, stored: torch.dtype, settings: ModelSettings) -> LoadedModel:
    """As `load_model`, with a model on the meta device: shapes without numbers. EOS ids are left out.

    `device` is the one that the weights would be on. Raises StartRefused as loading would, NoOutline when a
    forward pass needs numbers.
    """
    device = choose_device(settings.device)
    on_kernels = may_use_kernels(architecture.model_class, device, settings)
    dtype = choose_dtype(settings.dtype, stored, device, on_kernels=on_kernels)
    max_model_len = choose_max_model_len(settings.max_model_len, architecture.text_config)
    AttentionInterface.register(_NAME, _note_attention)
    layers: dict[int, LayerKv] = {}
    config = copy.deepcopy(architecture.config)
    # Models look for padding in the numbers of their input, of which there are none here.
    config.get_text_config(decoder=True).pad_token_id = None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_NAME, experts_implementation="batched_mm"
            )
            states = read_layer_states(model)
            width = _run(model.eval(), layers)
    except Exception as error:  # a model's code may do anything with a tensor
        raise NoOutline(first_line(error)) from error
    config = model.config.get_text_config(decoder=True)
    if len(layers) + len(states) != config.num_hidden_layers:
        raise NoOutline(f"{len(layers) + len(states)} of {config.num_hidden_layers} layers were seen")
    return LoadedModel(
        model=model,
        config=config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=width,
        eos_token_ids=frozenset(),
        layers=tuple(layer for _, layer in sorted(layers.items())),
        states=states,
    )


def weight_bytes(model: nn.Module) -> int:
    """What the weights take, tied ones once."""
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _run(model: Any, layers: dict[int, LayerKv]) -> int:
    """One pass over shapes, which fills `layers`; the width of the logits."""
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.long)
    positions = torch.arange(_NUM_TOKENS)[None]
    with torch.inference_mode():
        output = model(input_ids=tokens, position_ids=positions, use_cache=False, slipstream_layers=layers)
    return int(output.logits.shape[-1])


def _note_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for attention: notes the layer's shape. Shapes [1, heads, tokens, dim]."""
    layer = LayerKv(key.shape[1], key.shape[3], value.shape[3], kwargs.get("sliding_window") or None)
    kwargs["slipstream_layers"][module.layer_idx] = layer
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _read_gguf_config(path: Path) -> PreTrainedConfig:
    try:
        config, _ = read_gguf_config(read_gguf(path))
    except StartRefused:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise StartRefused(f"{path} cannot be converted: {first_line(error)}.") from error
    return config
