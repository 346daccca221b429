"""A GGUF file written out as a safetensors directory: weights in bfloat16, tokenizer, chat template, EOS ids.

Names, shapes and settings are mapped by transformers' own GGUF tables; what is added here is a progress bar,
refusal of a file that does not fill the model, and the digit rule those tables lack.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from engine.compute.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.compute.loading.gguf_model import name_file
from engine.compute.loading.gguf_names import EXPERTS, TensorPlaces
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.model_files import first_line
from engine.compute.loading.progress_bars import no_progress_bars
from engine.compute.loading.support import Architecture, check_num_layers, check_supported, find_model_class
from engine.compute.meta_device import on_meta_device
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

CONVERTER_VERSION = 1
TEXTS_VERSION = -1
_DTYPE = torch.bfloat16
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Byte-level vocabularies that were learned with every digit on its own. Without the split "a  1" would merge
# its spaces differently from the model's training.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})


def convert_gguf(source: Path, directory: Path) -> None:
    """Fill `directory` with the model in `source`; shows a progress bar on a terminal.

    Needs memory for the whole model in bfloat16. Raises StartRefused for a file that is damaged, incomplete
    or of an architecture that cannot be served; OSError or SafetensorError when writing fails.
    """
    log.info("converting %s to safetensors, once", source.name)
    try:
        file = read_gguf(source)
        model = _read_model(source, file)
        tokenizer = _read_tokenizer(source, file)
    except StartRefused:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise StartRefused(f"{source} cannot be converted: {first_line(error)}.") from error
    tokenizer.model_max_length = model.config.max_position_embeddings
    with no_progress_bars():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def prepare_gguf(source: Path, directory: Path) -> None:
    """Fill `directory` with all but the weights of the model in `source`, which stay there.

    Raises StartRefused as `convert_gguf` does.
    """
    log.info("reading the tokenizer and the settings in %s, once", source.name)
    try:
        file = read_gguf(source)
        config, _ = read_gguf_config(file)
        model_class = find_model_class(config)
        check_supported(Architecture(config, model_class))
        check_num_layers(config, len(file.tensors))
        tokenizer = _read_tokenizer(source, file)
    except StartRefused:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise StartRefused(f"{source} cannot be converted: {first_line(error)}.") from error
    config.architectures, config.dtype = [model_class.__name__], _DTYPE
    tokenizer.model_max_length = config.max_position_embeddings
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=_eos_token_ids(file) or None).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    name_file(directory, source)


def _read_model(source: Path, file: GgufFile) -> Any:
    """The model with every parameter filled, on the CPU in bfloat16."""
    config, settings = read_gguf_config(file)
    check_supported(Architecture(config, find_model_class(config)))
    check_num_layers(config, len(file.tensors))
    model = on_meta_device(partial(_outline, config))
    tensors = _read_tensors(file, model, settings)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if missing := [name for name, weights in model.state_dict().items() if weights.is_meta]:
        raise StartRefused(f"{source} is incomplete: it holds no {missing[0]} (of {len(missing)} missing).")
    model.generation_config.eos_token_id = _eos_token_ids(file) or None
    return model


def _outline(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=_DTYPE)


def _read_tensors(file: GgufFile, model: Any, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The weights by their name in the model, dequantized; of experts the gates and ups are one."""
    places = TensorPlaces(model, str(file.values["general.architecture"]), settings)
    tensors: dict[str, Tensor] = {}
    gates_and_ups: dict[str, dict[str, Tensor]] = {}
    for tensor in _with_progress(file.tensors):
        name = places.place(tensor.name)
        if name is None:
            continue
        values = places.values(tensor.name, tensor.values()).to(_DTYPE)
        experts = EXPERTS.fullmatch(tensor.name)
        if experts is None or experts["part"] == "down":
            tensors[name] = values
            continue
        parts = gates_and_ups.setdefault(name, {})
        parts[experts["part"]] = values
        if len(parts) == 2:
            tensors[name] = torch.cat([parts["gate"], parts["up"]], dim=1)
            parts.clear()
    return tensors


def _read_tokenizer(source: Path, file: GgufFile) -> Any:
    """The tokenizer with its special tokens and chat template."""
    with tempfile.TemporaryDirectory() as alone:
        # Files that happen to lie beside the GGUF must not be mixed in.
        (Path(alone) / "model.gguf").symlink_to(source.resolve())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file="model.gguf")
    tokenizer.name_or_path = source.stem
    for role, field in _SPECIAL_TOKENS.items():  # older tables mix them up
        token_id = file.values.get(f"tokenizer.ggml.{field}")
        setattr(tokenizer, role, None if token_id is None else tokenizer.convert_ids_to_tokens(token_id))
    rule = file.values.get("tokenizer.ggml.pre")
    if rule in _SINGLE_DIGITS and file.values.get("tokenizer.ggml.model") == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _eos_token_ids(file: GgufFile) -> list[int]:
    """Every id the file names as an end of sequence, turn or message."""
    found = {file.values.get(f"tokenizer.ggml.{name}") for name in _EOS_FIELDS}
    return sorted(token_id for token_id in found if isinstance(token_id, int))


def _with_progress(tensors: Sequence[GgufTensor]) -> Iterable[GgufTensor]:
    """`tensors`, with a bar on stderr while they are consumed; nothing when stderr is no terminal."""
    console = Console(stderr=True)
    return track(
        tensors, "Converting the model", console=console, transient=True, disable=not console.is_terminal
    )
