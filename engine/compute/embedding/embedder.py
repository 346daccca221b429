"""Embedder: a whole embedding model or cross-encoder in memory, from token ids to vectors or scores."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig

from config import ModelSettings
from engine.compute.embedding.attention import ATTENTION_NAME, register
from engine.compute.embedding.encoder import Encoder, never_give_way
from engine.compute.embedding.folder import EmbeddingFolder, read_folder
from engine.compute.embedding.pooling import HEAD_WEIGHTS, activation, load_head, pool
from engine.compute.embedding.records import EmbedderInfo, EncodedText
from engine.compute.embedding.texts import GiveWay
from engine.compute.loading.loader import choose_device, choose_dtype, misfit, stored_dtype
from engine.compute.loading.model_files import (
    check_model_files,
    count_tensors,
    first_line,
    stored_numbers,
    weight_files,
)
from engine.compute.loading.progress_bars import no_progress_bars, no_remarks
from engine.compute.loading.support import check_num_layers
from engine.compute.meta_device import on_meta_device
from engine.compute.runner.device import make_current
from engine.errors import StartRefused, UnsupportedModel

_LEAST_TOKENS = 4  # special tokens around one of its own


class Embedder:
    """Vectors of texts, or scores of pairs. One thread at a time; nothing is kept from call to call."""

    def __init__(
        self, encoder: Encoder, folder: EmbeddingFolder, head: nn.Sequential, info: EmbedderInfo
    ) -> None:
        self._encoder = encoder
        self._folder = folder
        self._head = head
        self.info = info

    @torch.inference_mode()
    def run(self, texts: Sequence[EncodedText], give_way: GiveWay = never_give_way) -> np.ndarray:
        """[num_texts, dimensions], or [num_texts, 1] for scores. Raises what `give_way` raises."""
        batch = self._encoder.batch(texts, partial(_give_way, self._encoder.device, give_way))
        rows = self._encoder.run(batch)
        if not self._folder.is_classifier:
            rows = pool(rows, batch, texts, self._folder.pooling, with_prompt=self._folder.pools_prompt)
        found: np.ndarray = batch.as_given(self._head(rows)).cpu().numpy()
        return found


def _give_way(device: torch.device, give_way: GiveWay) -> None:
    """When the device has done its piece. What a step keeps must not become an inference tensor."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    with torch.inference_mode(False):
        give_way()


def load_embedder(directory: Path, settings: ModelSettings) -> Embedder:
    """The model in `directory`, on the thread that will run it. Raises StartRefused."""
    folder = read_folder(directory)
    check_model_files(folder.directory)
    config = _read_config(folder.directory)
    if folder.is_classifier:
        _check_labels(folder, config)
    device = choose_device(settings.device)
    make_current(device)
    dtype = choose_dtype(settings.dtype, stored_dtype(folder.directory, config), device)
    model = _load_weights(folder, config, dtype).to(device)
    max_tokens = max_text_tokens(folder, config)
    encoder = Encoder(model, is_classifier=folder.is_classifier)
    vocab_size = int(config.get_text_config().vocab_size)
    encoder.check(vocab_size, max_tokens)
    if folder.is_classifier:
        made = activation(folder.activation or "Sigmoid", folder.directory / "config.json")
        return Embedder(encoder, folder, nn.Sequential(made), _info(max_tokens, vocab_size, None, model))
    head = nn.Sequential(*map(load_head, folder.heads)).to(device).eval().requires_grad_(False)
    sample = Embedder(encoder, folder, head, _info(max_tokens, vocab_size, None, model))
    width = int(sample.run([EncodedText([0, 0])]).shape[1])
    return Embedder(encoder, folder, head, _info(max_tokens, vocab_size, width, model))


@dataclass(frozen=True, slots=True)
class DescribedEmbedder:
    """What the files of a model tell without loading it; `weight_bytes` is about what they take in memory.

    It computes in `dtype`; `config` is the transformer's own.
    """

    architecture: str
    max_model_len: int
    weight_bytes: int
    dtype: torch.dtype
    config: PreTrainedConfig


def describe_embedder(folder: EmbeddingFolder, settings: ModelSettings) -> DescribedEmbedder:
    """The model of a folder, as loading it would take it. Raises StartRefused for what shows in the files."""
    device = choose_device(settings.device)
    check_model_files(folder.directory)
    config = _read_config(folder.directory)
    if folder.is_classifier:
        _check_labels(folder, config)
    dtype = choose_dtype(settings.dtype, stored_dtype(folder.directory, config), device)
    return DescribedEmbedder(
        next(iter(config.architectures or ()), config.model_type),
        max_text_tokens(folder, config),
        _weight_bytes(folder, dtype),
        dtype,
        config.get_text_config(),
    )


def _weight_bytes(folder: EmbeddingFolder, dtype: torch.dtype) -> int:
    """Of the transformer, and of the modules behind its pooling, which compute in float32."""
    heads = [path for module in folder.heads if (path := module.directory / HEAD_WEIGHTS).is_file()]
    behind = sum(sum(stored_numbers([path]).values()) for path in heads) * torch.float32.itemsize
    return sum(stored_numbers(weight_files(folder.directory)).values()) * dtype.itemsize + behind


def _check_labels(folder: EmbeddingFolder, config: PreTrainedConfig) -> None:
    if config.num_labels != 1:
        reason = f"gives {config.num_labels} scores to a pair of texts, and one is served"
        raise UnsupportedModel(f"{folder.directory} {reason}.")


def _info(max_tokens: int, vocab_size: int, width: int | None, model: Any) -> EmbedderInfo:
    dtype = str(model.dtype).removeprefix("torch.")
    return EmbedderInfo(max_tokens, vocab_size, width, dtype, str(model.device))


def max_text_tokens(folder: EmbeddingFolder, config: PreTrainedConfig) -> int:
    """The most tokens of a text: what the model's files say, or fewer where it has fewer positions."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if positions is not None and ("roberta" in text.model_type or text.model_type == "camembert"):
        positions -= int(text.pad_token_id or 0) + 1
    limits = [limit for limit in (folder.max_seq_length, positions) if limit is not None]
    if not limits:
        raise StartRefused(f"{folder.directory} does not say how long a text may be (max_seq_length).")
    if min(limits) < _LEAST_TOKENS:
        raise StartRefused(f"{folder.directory}: a text may have {min(limits)} tokens, too few for any.")
    return int(min(limits))


def _read_config(directory: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration class validates in its own way
        raise UnsupportedModel(
            f"{directory / 'config.json'} is not understood: {first_line(error)}."
        ) from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{directory} is an encoder-decoder, of which no vectors are served.")
    check_num_layers(config.get_text_config(), count_tensors(directory))
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{directory}: its weights are quantized (quantization_config).")
    return config


def _has_interface(kind: Any, config: PreTrainedConfig) -> bool:
    """Whether the model's class leaves attention to a function of ours."""
    found = kind._model_mapping.get(type(config), None)
    found = found[0] if isinstance(found, tuple) else found
    return bool(getattr(found, "_supports_attention_backend", False))


def _load_weights(folder: EmbeddingFolder, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model on the CPU, every weight that counts taken from the files. Raises StartRefused."""
    register()
    kind = AutoModelForSequenceClassification if folder.is_classifier else AutoModel
    try:
        with no_progress_bars(), no_remarks():
            model, report = on_meta_device(
                lambda: kind.from_pretrained(
                    folder.directory,
                    config=copy.deepcopy(config),
                    dtype=dtype,
                    attn_implementation=ATTENTION_NAME if _has_interface(kind, config) else None,
                    trust_remote_code=False,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
            )
    except Exception as error:  # transformers and its model classes raise whatever they like
        raise StartRefused(f"{folder.directory} cannot be loaded: {first_line(error)}.") from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, report.get(problem) or ()))
        if not folder.is_classifier:  # a pooler of the model's own is computed and not looked at
            found = [name for name in found if "pooler." not in name]
        if found:
            raise misfit(folder.directory, problem, found)
    model.config.use_cache = False
    return model.eval().requires_grad_(False)
