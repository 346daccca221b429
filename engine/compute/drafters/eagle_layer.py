"""EagleLayer: one decoder layer that goes on from a target's features, and the directory it is kept in.

EAGLE-3 (Li et al., 2025): at position i the layer takes the target's residual stream there, as it enters
three of its layers, and the embedding of the token at i + 1; it guesses the token at i + 2. The next guess
takes the layer's own output in place of the features. The directory has the layout of published drafters:

config.json         a Llama configuration of one layer; draft_vocab_size; and, in those that are trained
                    here, a table `slipstream`: the target's shape, `feature_layers` and `window`
model.safetensors   fc.weight [hidden, 3 * target's hidden], midlayer.*, norm.weight; d2t [draft_vocab], what
                    to add to a guess's index for its id; t2d [vocab], which ids can be guessed;
                    lm_head.weight and embed_tokens.weight, without which the target's are taken; and, in
                    those that are trained here, base_sample, to know the target by

Checkpoints of `speculators` are read too: theirs has the layer's configuration in transformer_layer_config
and calls the layer layers.0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine.compute.drafters.medusa_heads import (
    TargetShape,
    is_same_sample,
    restrict_projection,
    sample_weights,
)
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.model_files import bad_weights, read_json
from engine.errors import StartRefused

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_FEATURES = 3


@dataclass(frozen=True, slots=True)
class EagleShape:
    """What of a layer is no weight.

    `feature_layers` are the target's layers whose input is read. `window` is how many positions a position
    sees, its own among them; None is all before it. With `norms_residual` the normed input goes past
    attention, and not the input itself.
    """

    feature_layers: tuple[int, ...]
    window: int | None = None
    norms_residual: bool = False

    @classmethod
    def for_target(cls, num_layers: int, window: int | None = None) -> EagleShape:
        """The layers that published drafters read: one of the first, the middle one, one of the last."""
        return cls((min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)), window)


class EagleAttention(nn.Module):
    """The projections of the layer's attention; its input is twice as wide as the layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, head_dim = 2 * int(config.hidden_size), int(config.head_dim)
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, config.hidden_size, bias=False)


class EagleMidlayer(nn.Module):
    """The layer's weights, by the names of published checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn = EagleAttention(config)
        self.mlp = LlamaMLP(config)


class EagleLayer(nn.Module):
    """The layer without its attention, which is the caller's: training and serving keep K/V differently.

    `token_ids` [n] are the tokens it can guess. `projection` and `embedding` are the target's, frozen and not
    saved, unless a checkpoint brings its own.
    """

    def __init__(
        self, target: LoadedModel, config: LlamaConfig, shape: EagleShape, token_ids: torch.Tensor
    ) -> None:
        """`token_ids` ascend. Weights are fresh."""
        super().__init__()
        self.config = config
        self.shape = shape
        self.target_shape = TargetShape.of(target)
        self.fc = nn.Linear(NUM_FEATURES * self.target_shape.hidden_size, int(config.hidden_size), bias=False)
        self.midlayer = EagleMidlayer(config)
        self.norm = LlamaRMSNorm(int(config.hidden_size), float(config.rms_norm_eps))
        self.rotary = LlamaRotaryEmbedding(config)
        self.token_ids: torch.Tensor
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.base_sample = sample_weights(target)
        self._targets = (restrict_projection(target, token_ids), _embedding_of(target))  # no submodules
        self.own_projection: nn.Linear | None = None
        self.own_embedding: nn.Embedding | None = None
        self.to(target.device)

    @property
    def projection(self) -> nn.Linear:
        """From the normed output to logits of `token_ids`."""
        return self.own_projection or self._targets[0]

    @property
    def embedding(self) -> nn.Embedding:
        """Of the target's token ids."""
        return self.own_embedding or self._targets[1]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features [..., 3 * target's hidden] as the layer's first input [..., hidden]."""
        fused: torch.Tensor = self.fc(features)
        return fused

    def project(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [..., heads, head dim], key and value [..., K/V heads, head dim] of rows.

        `hidden` [..., hidden] is at `positions` [...], `token_ids` [...] are those behind them.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        embedded = self.embedding(token_ids).to(hidden.dtype)
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
        head_dim = int(self.config.head_dim)
        query, key, value = (
            linear(both).unflatten(-1, (-1, head_dim))
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = self.rotary(query, positions.reshape(1, -1))
        cos, sin = (table.view(*positions.shape, head_dim) for table in (cos, sin))
        query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=-2)
        return query, key, value

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The output [..., hidden], from the input and what attention found [..., heads * head dim]."""
        layer = self.midlayer
        if self.shape.norms_residual:
            hidden = layer.hidden_norm(hidden)
        hidden = hidden + layer.self_attn.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Of the tokens in `token_ids`, [..., n], from the layer's output."""
        guessed: torch.Tensor = self.projection(self.norm(output).to(self.projection.weight.dtype))
        return guessed

    def round_to(self, dtype: torch.dtype) -> None:
        """Give every weight this dtype. Angles keep theirs: rounded, they would be of other positions."""
        for weight in self.parameters():
            weight.data = weight.data.to(dtype)

    def save(self, directory: Path, recipe: Mapping[str, object]) -> None:
        """Write the directory's two files over what is there; `recipe` says how the layer was trained."""
        directory.mkdir(parents=True, exist_ok=True)
        can_guess = torch.zeros(self.target_shape.vocab_size, dtype=torch.bool)
        ids = self.token_ids.cpu()
        can_guess[ids] = True
        weights = self.state_dict() | {
            "d2t": ids - torch.arange(len(ids)),
            "t2d": can_guess,
            "base_sample": self.base_sample,
        }
        cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        save_file(cpu, directory / WEIGHTS_FILE)
        values = self.config.to_diff_dict() | {
            "architectures": [ARCHITECTURE],
            "draft_vocab_size": len(ids),
            "slipstream": {"target": asdict(self.target_shape), **asdict(self.shape), "recipe": dict(recipe)},
        }
        (directory / CONFIG_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def fresh_config(target: LoadedModel) -> LlamaConfig:
    """A layer as wide as the target's own."""
    theirs = target.config
    heads = int(theirs.num_attention_heads)
    return LlamaConfig(
        hidden_size=int(theirs.hidden_size),
        intermediate_size=int(theirs.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(theirs, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(theirs, "head_dim", None) or theirs.hidden_size // heads),
        num_hidden_layers=1,
        rms_norm_eps=float(getattr(theirs, "rms_norm_eps", 1e-5)),
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_model_len,
        rope_parameters=getattr(theirs, "rope_parameters", None),
    )


def load_eagle_layer(directory: Path, target: LoadedModel) -> EagleLayer:
    """The layer in `directory` on the target's device, in its dtype, without gradients.

    Raises StartRefused, one line, for anything missing, damaged, not finite, or made for another target.
    """
    config, shape = read_eagle_config(directory, target)
    weights = _read_weights(directory / WEIGHTS_FILE)
    token_ids = _read_token_ids(directory, weights, target.vocab_size)
    layer = EagleLayer(target, config, shape, token_ids)
    sample = weights.pop("base_sample", None)
    if sample is not None and not is_same_sample(sample, layer.base_sample):
        raise StartRefused(f"{directory}: this drafter was trained for another model of the same shape.")
    if (projection := weights.pop("lm_head.weight", None)) is not None:
        layer.own_projection = _linear(projection)
    if (embedding := weights.pop("embed_tokens.weight", None)) is not None:
        layer.own_embedding = nn.Embedding(embedding.shape[0], embedding.shape[1], _weight=embedding)
    _check_widths(directory / WEIGHTS_FILE, layer)
    _check_tensors(directory / WEIGHTS_FILE, weights, layer)
    layer.load_state_dict(weights, strict=False)
    layer.round_to(target.dtype)
    return layer.requires_grad_(False).to(target.device).eval()


def read_eagle_config(directory: Path, target: LoadedModel) -> tuple[LlamaConfig, EagleShape]:
    """What is known of the layer in `directory` without its weights. Raises StartRefused."""
    values = _read_config(directory)
    shape = _read_shape(directory, values, target)
    return LlamaConfig.from_dict({**values, "num_hidden_layers": 1}), shape


def check_eagle(directory: Path, target: LoadedModel) -> None:
    """Raise StartRefused unless there is a layer for a target of this shape; no weights are read."""
    _read_shape(directory, _read_config(directory), target)
    if not (directory / WEIGHTS_FILE).is_file():
        raise StartRefused(f"{directory}: there is no {WEIGHTS_FILE} in it.")


def is_for(directory: Path, target: LoadedModel) -> bool:
    """True if the layer in `directory` was trained here, for exactly this model.

    Of a target without weights only the shape is compared.
    """
    try:
        if "slipstream" not in _read_config(directory):
            return False
        check_eagle(directory, target)
        if next(target.model.parameters()).is_meta:
            return True
        with safe_open(directory / WEIGHTS_FILE, "pt") as tensors:
            return is_same_sample(tensors.get_tensor("base_sample"), sample_weights(target))
    except (StartRefused, OSError, SafetensorError):
        return False


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not os.path.isfile(path):
        raise StartRefused(f"{directory}: there is no {CONFIG_FILE} of a drafter in it.")
    values = dict(read_json(path))
    if "speculators_model_type" in values:
        return _from_speculators(path, values)
    if ARCHITECTURE not in (values.get("architectures") or ()):
        raise StartRefused(
            f"{path}: architectures is {values.get('architectures')}, expected {ARCHITECTURE}."
        )
    return values


def _from_speculators(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Their configuration as the original layout has it."""
    kind, layer = values["speculators_model_type"], values.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise StartRefused(f"{path}: speculators_model_type is {kind!r}, expected 'eagle3' with its layer.")
    kept = ("eagle_aux_hidden_state_layer_ids", "norm_before_residual")
    return {**layer, **{name: values.get(name) for name in kept}}


def _read_shape(directory: Path, values: Mapping[str, Any], target: LoadedModel) -> EagleShape:
    ours = TargetShape.of(target)
    own = values.get("slipstream")
    if not isinstance(own, dict):
        return _read_others_shape(directory, values, ours.num_hidden_layers)
    theirs = own.get("target")
    if theirs != asdict(ours):
        raise StartRefused(
            f"{directory}: this drafter is for a model of {theirs}, this one has {asdict(ours)}."
        )
    window = own.get("window")
    if not (window is None or (isinstance(window, int) and window > 0)):
        raise StartRefused(f"{directory}: window is {window!r}, expected a number of positions or null.")
    return EagleShape(_read_layers(directory, own.get("feature_layers"), ours.num_hidden_layers), window)


def _read_others_shape(directory: Path, values: Mapping[str, Any], num_layers: int) -> EagleShape:
    """Of a drafter that says nothing of its target."""
    shape = EagleShape.for_target(num_layers)
    inner = values.get("eagle_config")
    layers = (inner if isinstance(inner, dict) else values).get("eagle_aux_hidden_state_layer_ids")
    if layers is not None:
        shape = EagleShape(_read_layers(directory, layers, num_layers))
    window = values.get("sliding_window")
    return replace(
        shape,
        window=window if isinstance(window, int) and window > 0 else None,
        norms_residual=bool(values.get("norm_before_residual")),
    )


def _read_layers(directory: Path, value: object, num_layers: int) -> tuple[int, ...]:
    layers = tuple(value) if isinstance(value, list) else ()
    if len(layers) != NUM_FEATURES or not all(
        type(each) is int and 0 <= each < num_layers for each in layers
    ):
        raise StartRefused(f"{directory}: feature_layers is {value}, expected {NUM_FEATURES} layers.")
    return layers


def _read_token_ids(directory: Path, weights: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    offsets, can_guess = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        return torch.arange(vocab_size)
    token_ids = offsets.long() + torch.arange(len(offsets))
    sound = bool((token_ids >= 0).all() and (token_ids < vocab_size).all() and (token_ids.diff() > 0).all())
    if not sound or (can_guess is not None and not bool(can_guess[token_ids].all())):
        raise StartRefused(f"{directory / WEIGHTS_FILE}: d2t must name ascending ids below {vocab_size}.")
    return token_ids


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise bad_weights(path, error, "missing or damaged") from error


def _check_widths(path: Path, layer: EagleLayer) -> None:
    """Raise StartRefused unless what the layer reads and what it ends in are as wide as it is."""
    width = int(layer.config.hidden_size)
    head, embedding = layer.projection.weight, layer.embedding.weight
    if tuple(head.shape) != (len(layer.token_ids), width):
        raise StartRefused(
            f"{path}: lm_head.weight is {list(head.shape)}, expected {[len(layer.token_ids), width]}."
        )
    if tuple(embedding.shape) != (layer.target_shape.vocab_size, width):
        raise StartRefused(
            f"{path}: embed_tokens.weight is {list(embedding.shape)}, "
            f"expected {[layer.target_shape.vocab_size, width]}."
        )


def _check_tensors(path: Path, weights: Mapping[str, torch.Tensor], layer: EagleLayer) -> None:
    """Raise StartRefused unless `weights` are exactly the layer's own, finite and of the right shape."""
    expected = {
        name: tensor.shape
        for name, tensor in layer.state_dict().items()
        if not name.startswith(("own_projection", "own_embedding"))
    }
    if different := sorted(expected.keys() ^ weights.keys()):
        raise StartRefused(
            f"{path}: {different[0]} is {'missing' if different[0] in expected else 'not known'}."
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name]:
            raise StartRefused(f"{path}: {name} is {list(tensor.shape)}, expected {list(expected[name])}.")
        if not bool(tensor.isfinite().all()):
            raise StartRefused(f"{path}: {name} holds NaN or infinity.")


def _embedding_of(target: LoadedModel) -> nn.Embedding:
    found = target.model.get_input_embeddings()
    if not isinstance(found, nn.Embedding):
        raise StartRefused(f"{type(target.model).__name__} has no plain embedding, which a drafter needs.")
    return found


def _linear(weight: torch.Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
