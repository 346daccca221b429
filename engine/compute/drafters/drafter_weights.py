"""What the weights of heads and modules will take on the target's device, told by the headers of their files.

A target may be an outline. What a drafter shares with the target is not counted, nor copies of it in the
files, which loading drops.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.compute.drafters import eagle_layer, medusa_heads, medusa_published
from engine.compute.drafters.mtp_layouts import MtpLayout
from engine.compute.loading.loader import LoadedModel
from engine.compute.loading.model_files import read_json, stored_numbers, weight_files

_SAMPLE = "base_sample"  # stays on the host
_FEATURE_HEAD, _FEATURE_IDS = "lm_head.weight", "d2t"


def medusa_bytes(directory: Path, target: LoadedModel) -> int:
    """Of the heads in `directory`, trained here or published by others. Raises StartRefused."""
    if medusa_published.is_published(directory):
        numbers = stored_numbers([medusa_published.check_published(directory)])
        return sum(numbers.values()) * target.dtype.itemsize
    numbers = stored_numbers([directory / medusa_heads.WEIGHTS_FILE])
    config = read_json(directory / medusa_heads.CONFIG_FILE)
    count = _without(numbers, _SAMPLE)
    if config.get("tied_lm_head", True) is True:  # the target's rows of these tokens are copied
        count += int(config.get("num_token_ids") or 0) * int(target.config.hidden_size)
    return count * target.dtype.itemsize


def medusa_logits(directory: Path, target: LoadedModel) -> int:
    """How many tokens all heads in `directory` score together for one sequence. Raises StartRefused."""
    if medusa_published.is_published(directory):
        numbers = stored_numbers([medusa_published.check_published(directory)])
        scoring = sum(count for name, count in numbers.items() if medusa_published.is_projection(name))
        return scoring // int(target.config.hidden_size)
    config = read_json(directory / medusa_heads.CONFIG_FILE)
    return int(config.get("num_heads") or 0) * int(config.get("num_token_ids") or 0)


def eagle_bytes(directory: Path, target: LoadedModel) -> int:
    """Of the layer in `directory`. Raises StartRefused."""
    numbers = stored_numbers([directory / eagle_layer.WEIGHTS_FILE], whole=(_FEATURE_IDS,))
    count = _without(numbers, _SAMPLE, _FEATURE_IDS)
    if _FEATURE_HEAD not in numbers:  # the same as of Medusa heads
        count += numbers.get(_FEATURE_IDS, target.vocab_size) * int(target.config.hidden_size)
    return count * target.dtype.itemsize


def mtp_bytes(directory: Path, target: LoadedModel, layout: MtpLayout) -> int:
    """Of the module in the target's own files. Raises StartRefused.

    Its embedding and head are taken to be the target's once more.
    """
    begin = layout.begins(int(target.config.num_hidden_layers))
    numbers = stored_numbers(weight_files(directory))
    own = {name.removeprefix(begin): count for name, count in numbers.items() if name.startswith(begin)}
    return _without(own, f"{layout.embedding}.weight", f"{layout.head}.weight") * target.dtype.itemsize


def _without(numbers: Mapping[str, int], *names: str) -> int:
    return sum(count for name, count in numbers.items() if name not in names)
