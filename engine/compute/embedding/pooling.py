"""From the hidden states of a text's tokens to one vector, and what sentence-transformers puts behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.compute.embedding.folder import HeadModule
from engine.compute.embedding.records import EncodedText
from engine.compute.embedding.texts import TextBatch
from engine.compute.loading.model_files import first_line, read_json
from engine.errors import StartRefused, UnsupportedModel

HEAD_WEIGHTS = "model.safetensors"  # in the folder of a module behind the pooling
_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "Sigmoid": nn.Sigmoid,
}


def pool(
    hidden: Tensor, batch: TextBatch, texts: Sequence[EncodedText], modes: Sequence[str], *, with_prompt: bool
) -> Tensor:
    """[num_tokens, width] of a batch to [num_texts, width], several modes' vectors joined, as texts lie."""
    counted = None if with_prompt else _behind_prompts(batch, texts)
    return torch.cat([_pooled(hidden, batch, mode, counted) for mode in modes], dim=1)


def _behind_prompts(batch: TextBatch, texts: Sequence[EncodedText]) -> Tensor | None:
    """[num_tokens]: 1 for what is pooled, 0 for a prompt's tokens; None where there are none."""
    given = [texts[place].num_prompt_tokens for place in batch.order.tolist()]
    if not any(given):
        return None
    prompts = torch.tensor(given, device=batch.lengths.device)
    return (batch.positions >= prompts.repeat_interleave(batch.lengths)).float()


def _pooled(hidden: Tensor, batch: TextBatch, mode: str, counted: Tensor | None) -> Tensor:
    if mode == "cls":
        return hidden[batch.starts]
    if mode == "lasttoken":
        return hidden[batch.starts + batch.lengths - 1]
    if mode == "max":
        kept = hidden if counted is None else hidden.masked_fill(counted[:, None] == 0, -torch.inf)
        return torch.segment_reduce(kept, "max", lengths=batch.lengths, axis=0)
    weights = torch.ones_like(batch.positions, dtype=hidden.dtype) if counted is None else counted
    if mode == "weightedmean":
        weights = weights * (batch.positions + 1)
    total = torch.segment_reduce(weights, "sum", lengths=batch.lengths, axis=0).clamp(min=1e-9)
    rows = hidden if counted is None and mode != "weightedmean" else hidden * weights[:, None]
    summed = torch.segment_reduce(rows, "sum", lengths=batch.lengths, axis=0)
    return summed / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)[:, None]


class Normalize(nn.Module):
    """To length one."""

    def forward(self, x: Tensor) -> Tensor:
        """[num_texts, width] to the same."""
        return nn.functional.normalize(x, p=2, dim=1)


def load_head(module: HeadModule) -> nn.Module:
    """What a module behind the pooling computes, in float32. Raises StartRefused."""
    if module.kind == "Normalize":
        return Normalize()
    config = read_json(module.directory / "config.json")
    path = module.directory / HEAD_WEIGHTS
    if not path.is_file():
        raise StartRefused(f"{module.directory} has no safetensors weights.")
    try:
        weights = load_file(path)
        if module.kind == "LayerNorm":
            made: nn.Module = nn.LayerNorm(weights["norm.weight"].shape)
            made.load_state_dict({name.removeprefix("norm."): each for name, each in weights.items()})
            return made.float()
        width, in_width = weights["linear.weight"].shape  # whatever the configuration says
        linear = nn.Linear(in_width, width, bool(config.get("bias", True)))
        linear.load_state_dict({name.removeprefix("linear."): each for name, each in weights.items()})
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise StartRefused(f"{module.directory} cannot be loaded: {first_line(error)}.") from error
    return nn.Sequential(linear.float(), activation(config.get("activation_function"), module.directory))


def activation(name: object, source: Path) -> nn.Module:
    """torch's module of this name, which may be written with its package. Raises UnsupportedModel."""
    short = str(name or "Identity").rsplit(".", 1)[-1]
    if short not in _ACTIVATIONS:
        raise UnsupportedModel(f"{source}: the activation {short} is not served.")
    return _ACTIVATIONS[short]()
