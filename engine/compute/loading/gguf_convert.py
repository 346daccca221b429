"""A GGUF file written out as a safetensors directory: weights in bfloat16, tokenizer, chat template, EOS ids.

Names, shapes and settings are mapped by transformers' own GGUF tables; what is added here is a progress bar,
refusal of a file that does not fill the model, and what those tables lack but llama.cpp knows: the digit
rule, the ends of turns, whether texts begin with BOS, and how marks take the whitespace beside them.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from engine.compute.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.compute.loading.gguf_model import name_file
from engine.compute.loading.gguf_names import EXPERTS, TensorPlaces
from engine.compute.loading.gguf_settings import read_gguf_config
from engine.compute.loading.gguf_splits import begin_without_space, split_by_rule
from engine.compute.loading.model_files import first_line
from engine.compute.loading.progress_bars import no_progress_bars
from engine.compute.loading.support import Architecture, check_num_layers, check_supported, find_model_class
from engine.compute.meta_device import on_meta_device
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

CONVERTER_VERSION = 3
TEXTS_VERSION = -3
_DTYPE = torch.bfloat16
_EOS_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What ends a turn, by its text as llama.cpp knows it: files of Gemma and of Phi-3 name only the end of all
# text, and some have such a token among the ordinary ones.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>"),
    *("<|endoftext|>", "<|end_of_text|>", "<EOT>"),
)
_PLAIN_MARKS = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3: those that are no part of a conversation
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Byte-level vocabularies whose texts llama.cpp begins with BOS where a file does not say whether to (files of
# Llama 3 do not), and in which a word that is a token is that token, whatever the merges make of it.
_WITH_BOS = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("jina-v5-nano", "tekken"),
    }
)


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
        model.generation_config.eos_token_id = _eos_token_ids(file, tokenizer) or None
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
    GenerationConfig(eos_token_id=_eos_token_ids(file, tokenizer) or None).save_pretrained(directory)
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
    ends = [AddedToken(text, normalized=False, special=True) for text in _ends_in(tokenizer)]
    tokenizer.add_tokens(ends, special_tokens=True)
    kind, rule = file.values.get("tokenizer.ggml.model"), file.values.get("tokenizer.ggml.pre")
    is_byte_level = kind == "gpt2"
    if is_byte_level and rule is not None:
        split_by_rule(tokenizer.backend_tokenizer, str(rule))
    if kind == "llama" and file.values.get("tokenizer.ggml.add_space_prefix") is False:
        begin_without_space(tokenizer.backend_tokenizer)
    if kind == "llama" and file.values.get("general.architecture") == "phi3":
        _strip_behind_marks(tokenizer)
    if rule in _WITH_BOS and is_byte_level:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in file.values and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True
    return tokenizer


def _strip_behind_marks(tokenizer: Any) -> None:
    """Have the marks of a conversation take the whitespace behind them: Phi-3's do, which no file says."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in described["added_tokens"]:
        token["rstrip"] = token["special"] and token["content"] not in _PLAIN_MARKS
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))


def _eos_token_ids(file: GgufFile, tokenizer: Any) -> list[int]:
    """Every id that is an end of sequence, turn or message: as the file names it, or by its text."""
    found = {file.values.get(f"tokenizer.ggml.{name}") for name in _EOS_FIELDS}
    found |= set(_ends_in(tokenizer).values())
    return sorted(token_id for token_id in found if isinstance(token_id, int))


def _ends_in(tokenizer: Any) -> dict[str, int]:
    vocabulary = tokenizer.get_vocab()
    found = {text: vocabulary[text] for text in _ENDS if text in vocabulary}
    if "<|return|>" in vocabulary:  # of gpt-oss: what ends is a message, behind which the answer comes
        found.pop("<|end|>", None)
    return found


def _with_progress(tensors: Sequence[GgufTensor]) -> Iterable[GgufTensor]:
    """`tensors`, with a bar on stderr while they are consumed; nothing when stderr is no terminal."""
    console = Console(stderr=True)
    return track(
        tensors, "Converting the model", console=console, transient=True, disable=not console.is_terminal
    )
