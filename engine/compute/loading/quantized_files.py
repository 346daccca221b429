"""The weights of a quantized safetensors checkpoint, unpacked projection by projection as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.compute.loading.model_files import first_line, weight_files
from engine.compute.loading.weight_formats import WeightFormat
from engine.errors import StartRefused

# What belongs to rounding that is not done: of inputs, outputs, keys and values.
_UNUSED = (
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
)


def unpacked_tensors(directory: Path, weight_format: WeightFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor by its name in the model, quantized weights as numbers of `dtype`.

    Raises StartRefused for what does not fit the format.
    """
    files = _names_by_file(directory)
    found: dict[str, Tensor] = {}
    for prefix, endings in _projections(list(files), weight_format).items():
        parts = {ending: _read(files, f"{prefix}.{ending}") for ending in endings}
        try:
            found[f"{prefix}.weight"] = weight_format.numbers(parts).to(dtype)
        except Exception as error:  # a damaged file fails in any of a dozen ways
            raise StartRefused(
                f"{directory}: {prefix} is not stored as {weight_format.name} ({first_line(error)})."
            ) from error
        for ending in endings:
            files.pop(f"{prefix}.{ending}")
    for name in files:
        if name.endswith(tuple(f".{ending}" for ending in _UNUSED)):
            continue
        found[name] = _read(files, name)
        if name.endswith("weight") and (found[name].itemsize == 1 or not found[name].is_floating_point()):
            raise StartRefused(f"{directory}: {name} has no scale, as {weight_format.name} would give it.")
    return found


def _names_by_file(directory: Path) -> dict[str, Path]:
    """The file of each tensor."""
    files: dict[str, Path] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def _projections(names: Sequence[str], weight_format: WeightFormat) -> dict[str, list[str]]:
    """The quantized projections, each with the endings that it has."""
    marker = f".{weight_format.marker}"
    known, prefixes = set(names), [name.removesuffix(marker) for name in names if name.endswith(marker)]
    return {
        prefix: [ending for ending in weight_format.endings if f"{prefix}.{ending}" in known]
        for prefix in prefixes
    }


def _read(files: dict[str, Path], name: str) -> Tensor:
    with safe_open(files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
