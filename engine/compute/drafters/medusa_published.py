"""load_published_medusa: heads in the layout of Medusa's authors, for a target that they only name.

A directory of theirs holds (Cai et al., "Medusa", 2024):

config.json         medusa_num_heads, medusa_num_layers and base_model_name_or_path
weights             medusa_lm_head.safetensors. One named .pt could run code when read, and is not.
                    {k}.{block}.linear.weight and .bias for each of a head's medusa_num_layers blocks, and
                    {k}.{medusa_num_layers}.weight, its projection [vocabulary, hidden]

Nothing in it tells the target that the heads are for but that name: one of the same width is taken at its
word. Heads beyond medusa_num_heads are used, since some configurations say fewer than there are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.compute.drafters.draft_tree import default_tree
from engine.compute.drafters.medusa_heads import (
    CONFIG_FILE,
    MAX_HEADS,
    MODEL_TYPE,
    MedusaHeads,
    check_tensors,
)
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.model_files import bad_weights, read_json
from engine.errors import StartRefused

WEIGHTS = "medusa_lm_head.safetensors"
_PICKLED = "medusa_lm_head.pt"
# How the list of heads is called where a name says it.
_LIST = re.compile(r"^medusa_heads?\.")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_PROJECTION = re.compile(r"^(\d+)\.(\d+)\.weight$")


def is_published(directory: Path) -> bool:
    """True for a directory in this layout. Raises StartRefused where its config.json cannot be read."""
    path = directory / CONFIG_FILE
    if not os.path.isfile(path):  # unlike Path.is_file, False where one may not look
        return False
    values = read_json(path)
    return "medusa_num_heads" in values and values.get("model_type") != MODEL_TYPE


def check_published(directory: Path) -> Path:
    """The file of the weights. Raises StartRefused where there is none, or the sizes are nonsense."""
    _read_sizes(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        is_pickled = (directory / _PICKLED).is_file()
        beside = f" (only {_PICKLED}, which could run code when read)" if is_pickled else ""
        raise StartRefused(f"--medusa-heads {directory}: there is no {WEIGHTS} in it{beside}.")
    return path


def is_projection(name: str) -> bool:
    """Whether the tensor of this name is what a head scores tokens by."""
    return _PROJECTION.match(_LIST.sub("", name)) is not None


def load_published_medusa(directory: Path, target: LoadedModel) -> MedusaHeads:
    """The heads in `directory` on the target's device, in its dtype, with a tree for typical heads.

    Raises StartRefused, one line, for anything missing, damaged, not finite, or of another width.
    """
    path = check_published(directory)
    least_heads, num_blocks = _read_sizes(directory)
    weights = _our_names(path, _read_weights(path), num_blocks)
    num_heads = len([name for name in weights if name.endswith("lm_head.weight")])
    if not least_heads <= num_heads <= MAX_HEADS:
        raise StartRefused(
            f"{path} holds {num_heads} heads, expected {least_heads} (medusa_num_heads) to {MAX_HEADS}."
        )
    num_token_ids = next(iter(weights.get("heads.0.lm_head.weight", torch.empty(0)).shape), 0)
    tree = default_tree(num_heads)
    if not tree.width <= num_token_ids <= target.vocab_size:
        raise StartRefused(
            f"{path}: these heads guess {num_token_ids} tokens, this model has {target.vocab_size}."
        )
    heads = MedusaHeads(target, num_heads, torch.arange(num_token_ids), tree, max(1, num_blocks))
    heads.give_own_projections()
    if num_blocks == 0:  # a fresh block passes on what it is given
        weights |= {name: value for name, value in heads.state_dict().items() if ".linear." in name}
    check_tensors(path, weights, heads)
    heads.load_state_dict(weights, strict=False)
    return heads.requires_grad_(False).to(target.dtype).eval()


def _read_sizes(directory: Path) -> tuple[int, int]:
    """How many heads there are at least, and of how many blocks each."""
    values = read_json(directory / CONFIG_FILE)
    sizes = values.get("medusa_num_heads"), values.get("medusa_num_layers", 1)
    for name, size, least in zip(("heads", "layers"), sizes, (1, 0), strict=True):
        if type(size) is not int or not least <= size <= MAX_HEADS:
            raise StartRefused(
                f"{directory / CONFIG_FILE}: medusa_num_{name} is {size!r}, "
                f"expected a whole number of {least} to {MAX_HEADS}."
            )
    return sizes  # type: ignore[return-value]  # checked above


def _read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise bad_weights(path, error) from error


def _our_names(path: Path, weights: Mapping[str, torch.Tensor], num_blocks: int) -> dict[str, torch.Tensor]:
    """The tensors as MedusaHeads names them."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        bare = _LIST.sub("", name)
        if (block := _BLOCK.match(bare)) and int(block[2]) < num_blocks:
            place = "linear" if block[2] == "0" else f"further.{int(block[2]) - 1}"
            renamed[f"heads.{int(block[1])}.{place}.{block[3]}"] = tensor
        elif (projection := _PROJECTION.match(bare)) and int(projection[2]) == num_blocks:
            renamed[f"heads.{int(projection[1])}.lm_head.weight"] = tensor
        else:
            raise StartRefused(f"{path}: {name} is not known in heads of {num_blocks} blocks.")
    return renamed
