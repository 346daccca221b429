"""A model without its weights: everything that sizing needs, in a second and hardly any memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from config import ModelSettings
from engine.compute.loading.coded_weights import CodedLinear
from engine.compute.loading.gguf_file import read_gguf
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.layer_probe import ProbeResult, probe_layers
from engine.compute.loading.loader import (
    LoadedModel,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    may_use_kernels,
    misfit,
    stored_dtype,
)
from engine.compute.loading.locate import FoundModel
from engine.compute.loading.model_files import count_tensors, first_line, tensor_names
from engine.compute.loading.progress_bars import no_remarks
from engine.compute.loading.support import (
    Architecture,
    check_num_layers,
    check_supported,
    find_model_class,
    make_model,
    read_architecture,
    without_padding,
)
from engine.compute.meta_device import on_meta_device
from engine.errors import StartRefused, UnsupportedModel

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
        check_num_layers(architecture.text_config, count_tensors(found.directory))
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
    config = without_padding(architecture.config)

    def make() -> tuple[PreTrainedModel, PreTrainedConfig, ProbeResult]:
        with torch.device("meta"), no_remarks():
            model = make_model(config, dtype=dtype, experts_implementation="batched_mm")
            text_config = model.config.get_text_config(decoder=True)
            return model, text_config, probe_layers(model.eval(), text_config)

    try:
        model, text_config, probe = on_meta_device(make)
    except UnsupportedModel as refusal:
        if refusal.__cause__ is None:
            raise
        raise NoOutline(first_line(refusal.__cause__)) from refusal  # perhaps only for want of numbers
    except Exception as error:  # a model's code may do anything with a tensor
        raise NoOutline(first_line(error)) from error
    return LoadedModel(
        model=model,
        config=text_config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=probe.vocab_size,
        eos_token_ids=frozenset(),
        layers=probe.layers,
        states=probe.states,
        attending=probe.attending,
    )


def check_head(directory: Path, architecture: Architecture, model: PreTrainedModel) -> None:
    """Raise StartRefused, as loading would, where weights of another class have no output embedding."""
    if type(model).__name__ in (architecture.config.architectures or [type(model).__name__]):
        return
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    if head is None or head.weight is model.get_input_embeddings().weight or not names:
        return
    ending = names[0].rpartition(".")[2] + ".weight"
    if not any(name.endswith(ending) for name in tensor_names(directory)):
        raise misfit(directory, "missing_keys", [f"{names[0]}.weight"])


def weight_bytes(model: nn.Module) -> int:
    """What the weights take, tied ones once."""
    tensors: Sequence[Tensor] = [*model.parameters(), *model.buffers()]
    coded = sum(module.coded.nbytes for module in model.modules() if isinstance(module, CodedLinear))
    return coded + sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _read_gguf_config(path: Path) -> PreTrainedConfig:
    try:
        file = read_gguf(path)
        config, _ = read_gguf_config(file)
        check_num_layers(config, len(file.tensors))
    except StartRefused:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise StartRefused(f"{path} cannot be converted: {first_line(error)}.") from error
    return config
