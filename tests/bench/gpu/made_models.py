"""Models of random weights made on the device, a pair of them that agrees as often as wanted, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from config import ModelSettings
from engine.compute import attention
from engine.compute.cuda.layer_choice import with_fast_layers
from engine.compute.loading.layer_probe import probe_layers
from engine.compute.loading.loader import LoadedModel
from engine.text.tokenizer import Tokenizer
from tests.bench.streams import BenchmarkFailed

BLOCK_SIZE = 16
_SPECIAL = ("<bos>", "<eos>")
_HARDLY = 1e-5  # what a layer of a walking model adds, against what it would: no token changes by it


def make_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, max_model_len: int, seed: int = 0
) -> LoadedModel:
    """A model of this configuration with random weights, as `load_model` would give it."""
    attention.register()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.ATTENTION_NAME
        )
    model.config.use_cache = False
    model.eval().requires_grad_(False)
    probe = probe_layers(model, model.config)
    return LoadedModel(
        model=model,
        config=model.config,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        vocab_size=probe.vocab_size,
        eos_token_ids=frozenset(),
        layers=probe.layers,
        states=probe.states,
        attending=probe.attending,
    )


def fused(loaded: LoadedModel) -> LoadedModel:
    """The model with its layers as `load_parts` would have them. Raises BenchmarkFailed if that fails."""

    def reload() -> LoadedModel:
        raise BenchmarkFailed("the layers cannot be fused")

    return with_fast_layers(loaded, ModelSettings(), BLOCK_SIZE, reload)


def weight_bytes(loaded: LoadedModel) -> int:
    """What of the weights a step must read: all but an embedding table, of which it looks up a few rows."""
    model: Any = loaded.model
    num_bytes: int = sum(parameter.nbytes for parameter in model.parameters())  # a tied one counts once
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return num_bytes - (0 if table is head else table.nbytes)


def token_bytes(loaded: LoadedModel) -> int:
    """What one token's keys and values take in all layers."""
    numbers = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in loaded.layers)
    return numbers * loaded.dtype.itemsize


def product_operations(loaded: LoadedModel) -> int:
    """Floating-point operations of one token in all matrix products but the output projection."""
    model: Any = loaded.model
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    outside: int = head.numel() + (0 if head is table else table.numel())
    inside: int = sum(parameter.numel() for parameter in model.parameters()) - outside
    return 2 * inside


# A pair whose acceptance is known.


def random_walk(vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Each token's successor, [vocab] on the CPU: one cycle through all of them in random order."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    successors = torch.empty_like(order)
    successors[order] = order.roll(-1)
    return successors


def strayed(successors: torch.Tensor, agreement: float, seed: int = 1) -> torch.Tensor:
    """Successors of which only the share `agreement` is as before; again each token is one's successor."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(len(successors), generator=generator)[: round((1 - agreement) * len(successors))]
    changed = successors.clone()
    changed[others] = successors[others].roll(1)
    return changed


@torch.no_grad()
def make_walk(loaded: LoadedModel, successors: torch.Tensor) -> None:
    """Have the model, whose embeddings are not tied, say each token's successor; every weight is still used.

    What layers add hardly counts then, so the last hidden state is the newest token's embedding, and that is
    made the output projection's row of its successor.
    """
    model: Any = loaded.model
    for layer in model.get_decoder().layers:
        layer.self_attn.o_proj.weight.mul_(_HARDLY)
        layer.mlp.down_proj.weight.mul_(_HARDLY)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert table is not head, "the output projection is the embedding table itself"
    head[successors.to(head.device)] = table


# Text.


def make_tokenizer(vocab_size: int, *, spells: bool = False) -> Tokenizer:
    """That of `save_tokenizer`."""
    with TemporaryDirectory() as directory:
        save_tokenizer(Path(directory), vocab_size, spells=spells)
        config = Path(directory, "config.json")
        if not config.exists():
            config.write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
        return Tokenizer(Path(directory))


def save_tokenizer(directory: Path, vocab_size: int, *, spells: bool = False) -> None:
    """Words that are numbers, one a token: the text of a reply costs what it would cost.

    One that `spells` has every byte before them, so that it can say anything, as JSON.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if spells else []
    words = [f"\u0120w{number}" for number in range(vocab_size - len(_SPECIAL) - len(letters))]
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *letters, *words))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=_SPECIAL[0], eos_token=_SPECIAL[1])
    fast.save_pretrained(directory)
