"""MtpModule: one more layer of a model, read from the model's own files, that guesses the token after next.

The layer is computed by transformers as a model of one layer, so that attention, experts and norms are those
of its family; see MtpLayout.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.compute.attention import ATTENTION_NAME, CONTEXT_KEYWORD, register
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.drafters.mtp_layouts import MtpLayout
from engine.compute.loading.layer_probe import probe_layers
from engine.compute.loading.loader import LoadedModel, misfit
from engine.compute.loading.model_files import bad_weights, first_line, weight_files
from engine.compute.loading.progress_bars import no_progress_bars, no_remarks
from engine.compute.loading.quantized_files import unpack_files
from engine.compute.loading.support import read_architecture, weight_format_of
from engine.compute.meta_device import on_meta_device
from engine.errors import StartRefused

log = logging.getLogger("slipstream.model")

_VOCABULARY = 8  # of the model of one layer, whose embedding and head are never used
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class MtpParts:
    """What is read of a module, in the target's dtype: `embedding` and `head` only where it has others."""

    block: PreTrainedModel  # of one layer
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: nn.Linear
    embedding: nn.Embedding | None
    head: nn.Linear | None


class MtpModule(nn.Module):
    """The module without K/V, which its caller keeps: `layer` says what it keeps of a position."""

    def __init__(self, target: LoadedModel, layout: MtpLayout, parts: MtpParts) -> None:
        super().__init__()
        self.layer: LayerKv = probe_layers(parts.block, parts.block.config).layers[0]
        self._block: Any = parts.block.base_model
        self._block.embed_tokens = None  # it is given what is embedded
        self._whole = (parts.block,)  # no submodule: its tables have nothing of the files
        self._embedding_norm = parts.embedding_norm
        self._hidden_norm = parts.hidden_norm
        self._projection = parts.projection
        self._own_embedding, self._own_head = parts.embedding, parts.head
        self._hidden_first = layout.hidden_first
        # A copy: the target's may be replaced by one that the kernels compute.
        self._read_norm = (
            copy.deepcopy(target.model.base_model.norm) if layout.reads_normed else nn.Identity()
        )
        self.vocab_size = target.vocab_size
        self.follow(target)

    @property
    def weight(self) -> torch.Tensor:
        """One of its weights, of its dtype and on its device."""
        return self._projection.weight

    def follow(self, target: LoadedModel) -> None:
        """Take embedding and head of this model from now on: the target as it is served.

        They are not looked for again: while the target's thread scores prompts, its model has no embedding.
        """
        model = target.model
        self._theirs = (model.get_input_embeddings(), model.get_output_embeddings())  # no submodules

    def as_model(self, target: LoadedModel) -> LoadedModel:
        """Its layer as a model with tables of its own, of a few tokens, on the target's device.

        What modules are replaced in it stay in this module; their weights are shared.
        """
        model: Any = _sharing(self._whole[0])
        embedding, head = torch.randn(2, _VOCABULARY, int(model.config.hidden_size)).to(self.weight)
        width = embedding.shape[1]
        model.base_model.embed_tokens = nn.Embedding(_VOCABULARY, width, _weight=embedding)
        model.lm_head = _linear(head)
        probe = probe_layers(model, model.config)
        return replace(
            target,
            model=model,
            config=model.config,
            vocab_size=_VOCABULARY,
            layers=probe.layers,
            states=probe.states,
            attending=probe.attending,
            kept_kv=None,
            kernels_used="",
        )

    def with_layer_of(
        self, model: PreTrainedModel, quick_norm: Callable[[nn.Module], nn.Module]
    ) -> MtpModule:
        """The same module around the layer of what `as_model` gave, whatever was replaced in that.

        `quick_norm` gives what stands for a norm of its own.
        """
        made: MtpModule = copy.copy(self)
        block: Any = model.base_model
        block.embed_tokens = None
        norms = {name: quick_norm(getattr(self, name)) for name in ("_embedding_norm", "_hidden_norm")}
        made._modules = {**self._modules, "_block": block, **norms}
        made._whole = (model,)
        return made

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """The hidden state that it goes on from, of what left the target's last layer: [N, hidden]."""
        read: torch.Tensor = self._read_norm(features)
        return read

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, context: object
    ) -> torch.Tensor:
        """The hidden states that its head reads, [N, hidden], and that it would go on from itself.

        `hidden` [N, hidden] are at `positions` [N], `token_ids` [N] are those behind them; `context` attends,
        as an AttentionContext does.
        """
        embed = self._own_embedding or self._theirs[0]
        normed = [self._embedding_norm(embed(token_ids)), self._hidden_norm(hidden)]
        fused = self._projection(torch.cat(normed[::-1] if self._hidden_first else normed, dim=-1))
        output = self._block(
            inputs_embeds=fused[None],
            position_ids=positions[None],
            use_cache=False,
            **{CONTEXT_KEYWORD: context},
        )
        last: torch.Tensor = output.last_hidden_state[0]
        return last

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Of every token, [N, vocab]."""
        head = self._own_head or self._theirs[1]
        logits: torch.Tensor = head(last)
        return logits


def load_mtp_module(directory: Path, target: LoadedModel, layout: MtpLayout) -> MtpModule:
    """The module in the files of `target`, on its device, in its dtype, without gradients.

    Raises StartRefused, one line, for anything missing, damaged, not finite or of another shape.
    """
    begin = layout.begins(int(target.config.num_hidden_layers))
    stored = {
        name.removeprefix(begin): tensor
        for name, tensor in _read_tensors(directory, target, lambda name: name.startswith(begin)).items()
    }
    taken = _Taken(directory, begin, stored, target)
    block = _load_block(directory, target, layout, stored)
    norm = block.base_model.norm
    parts = MtpParts(
        block,
        taken.norm(layout.embedding_norm, norm),
        taken.norm(layout.hidden_norm, norm),
        taken.projection(layout.projection),
        taken.embedding(layout.embedding),
        taken.head(layout.head),
    )
    module = MtpModule(target, layout, parts).requires_grad_(False).to(target.device).eval()
    for name, weight in module.named_parameters():
        if not bool(weight.isfinite().all()):
            raise StartRefused(f"{directory}: {name} of {begin}* holds NaN or infinity.")
    return module


class _Taken:
    """The parts of a module that are no decoder layer, each of the shape that the target asks for."""

    def __init__(
        self, directory: Path, begin: str, stored: dict[str, torch.Tensor], target: LoadedModel
    ) -> None:
        self._directory, self._begin = directory, begin
        self._stored, self._target = stored, target
        self._hidden = int(target.config.hidden_size)

    def norm(self, name: str, like: nn.Module) -> nn.Module:
        """A norm of the kind of `like`."""
        made = copy.deepcopy(like)
        made.weight = nn.Parameter(self._tensor(name, (self._hidden,)))
        return made

    def projection(self, name: str) -> nn.Linear:
        """From an embedding and a hidden state, side by side, to what the layer takes."""
        return _linear(self._tensor(name, (self._hidden, 2 * self._hidden)))

    def embedding(self, name: str) -> nn.Embedding | None:
        """The module's own; None where it has none, or the target's once more."""
        weight = self._other_than(name, self._target.model.get_input_embeddings())
        if weight is None:
            return None
        return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)

    def head(self, name: str) -> nn.Linear | None:
        """The same of the output embedding."""
        weight = self._other_than(name, self._target.model.get_output_embeddings())
        return None if weight is None else _linear(weight)

    def _other_than(self, name: str, theirs: Any) -> torch.Tensor | None:
        if f"{name}.weight" not in self._stored:
            return None
        weight = self._tensor(name, tuple(theirs.weight.shape))
        return None if torch.equal(weight.to(theirs.weight.device), theirs.weight) else weight

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._stored.get(f"{name}.weight")
        if tensor is None:
            raise StartRefused(f"{self._directory}: {self._begin}{name}.weight is missing.")
        if tuple(tensor.shape) != shape:
            raise StartRefused(
                f"{self._directory}: {self._begin}{name}.weight is {list(tensor.shape)}, "
                f"expected {list(shape)}."
            )
        return tensor.to(self._target.dtype)


def _load_block(
    directory: Path, target: LoadedModel, layout: MtpLayout, stored: dict[str, torch.Tensor]
) -> PreTrainedModel:
    """The decoder layer and the norm behind it, as a model of one layer of the target's class."""
    base = target.model.base_model_prefix
    apart = {
        f"{name}.weight"
        for name in (
            *(layout.embedding_norm, layout.hidden_norm, layout.projection, layout.last_norm),
            *(layout.embedding, layout.head),
        )
    }
    tensors = {
        f"{base}.layers.0.{name.removeprefix(layout.layer)}": tensor
        for name, tensor in stored.items()
        if name.startswith(layout.layer) and name not in apart
    }
    config = _of_one_layer(target.config, sparse=any(_EXPERTS in name for name in tensors))
    if (norm := stored.get(f"{layout.last_norm}.weight")) is not None:
        tensors[f"{base}.norm.weight"] = norm
    register()
    try:
        with no_progress_bars(), no_remarks():
            model, report = on_meta_device(
                lambda: type(target.model).from_pretrained(
                    None,
                    config=config,
                    state_dict=tensors,
                    dtype=target.dtype,
                    attn_implementation=ATTENTION_NAME,
                    output_loading_info=True,
                )
            )
    except Exception as error:  # transformers and its model classes raise whatever they like
        raise StartRefused(f"{directory}: its MTP module cannot be loaded: {first_line(error)}.") from error
    unused = {f"{base}.embed_tokens.weight", "lm_head.weight"}
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := sorted({str(each) for each in report.get(problem) or ()} - unused):
            raise misfit(directory, f"MTP module: {problem}", found)
    loaded: PreTrainedModel = model
    return loaded.eval().requires_grad_(False)


def _of_one_layer(config: PreTrainedConfig, *, sparse: bool) -> PreTrainedConfig:
    """The target's configuration for one layer that attends to everything, with experts or without.

    A configuration says in one of several ways which layers have experts.
    """
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "vocab_size": _VOCABULARY,
        "pad_token_id": None,
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "use_cache": False,
    }
    made = copy.deepcopy(config)
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(made, name, value)
    return made


def _read_tensors(
    directory: Path, target: LoadedModel, wanted: Callable[[str], bool]
) -> dict[str, torch.Tensor]:
    # The loaded model's configuration no longer says how its files are quantized.
    weight_format = weight_format_of(read_architecture(directory).config)
    if weight_format is not None:
        return unpack_files(directory, weight_format, target.dtype, wanted).tensors
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise bad_weights(path, error) from error
    return found


def _sharing(module: Any) -> Any:
    """A copy of the tree of modules, over the same weights."""
    made = copy.copy(module)
    for own in ("_parameters", "_buffers"):
        setattr(made, own, dict(getattr(module, own)))
    made._modules = {name: child and _sharing(child) for name, child in module._modules.items()}
    return made


def _linear(weight: torch.Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
