"""The weights of a quantized safetensors checkpoint, unpacked projection by projection as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Format
from safetensors import safe_open
from torch import Tensor, nn

from engine.compute.loading.coded_weights import CodedLinear, CodedWeight, CodeKind, foreseen_linear
from engine.compute.loading.model_files import first_line, weight_files
from engine.compute.loading.stored_weights import ExpertWeights, StoredExperts, StoredLinear, StoredWeight
from engine.compute.loading.weight_formats import WeightFormat
from engine.compute.native.families import called_linears, has_read_experts
from engine.errors import StartRefused

_BLOCK = 32  # inputs with one scale
_SAMPLE = 32  # outputs that are compared
_BITS_OF = {"F8_E4M3": 8, "I8": 8, "U8": 8, "F16": 16, "BF16": 16, "I64": 64, "F64": 64}  # else 32
# What belongs to rounding that is not done: of inputs, outputs, keys and values.
_UNUSED = (
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
)


@dataclass(frozen=True, slots=True)
class KeptCodes:
    """What is not unpacked: the projections of `shapes` [out, in], by name, that codes of `kinds` hold.

    Their codes go to `device` as they are read.
    """

    shapes: Mapping[str, torch.Size]
    kinds: frozenset[CodeKind]
    device: torch.device


NO_CODES = KeptCodes({}, frozenset(), torch.device("cpu"))


@dataclass(slots=True)
class Unpacked:
    """Every tensor by its name in the model, and those projections that blocks of GGUF's hold exactly.

    Of projections whose codes are kept `tensors` has a stand-in without memory, which is nobody else's;
    `expanded` are the others.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, StoredWeight] = field(default_factory=dict)
    coded: dict[str, CodedWeight] = field(default_factory=dict)
    expanded: list[str] = field(default_factory=list)


def unpack_files(
    directory: Path,
    weight_format: WeightFormat,
    dtype: torch.dtype,
    wanted: Callable[[str], bool] = lambda _: True,
    kept: KeptCodes = NO_CODES,
) -> Unpacked:
    """The checkpoint in `directory`, its quantized weights as numbers of `dtype`, or as codes where `kept`.

    Only tensors of `wanted` names are read. Raises StartRefused for what does not fit the format.
    """
    files = {name: path for name, path in _names_by_file(directory).items() if wanted(name)}
    unpacked = Unpacked()
    found = unpacked.tensors
    for prefix, endings in _projections(list(files), weight_format).items():
        parts = {ending: _read(files, f"{prefix}.{ending}") for ending in endings}
        try:
            if (coded := _coded(prefix, parts, weight_format, kept)) is not None:
                unpacked.coded[prefix] = coded
                found[f"{prefix}.weight"] = torch.zeros((), dtype=dtype).expand(kept.shapes[prefix])
            else:
                unpacked.expanded.append(prefix)
                codes, scales = weight_format.unpack(parts)
                found[f"{prefix}.weight"] = (codes * scales).to(dtype)
                if (stored := in_blocks(codes, scales)) is not None:
                    unpacked.stored[prefix] = stored
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
    return unpacked


def _coded(
    prefix: str, parts: Mapping[str, Tensor], weight_format: WeightFormat, kept: KeptCodes
) -> CodedWeight | None:
    """The codes of a projection where they are to be kept, on their device; None where they are not."""
    if prefix not in kept.shapes:
        return None
    coded = weight_format.coded({ending: part.to(kept.device) for ending, part in parts.items()}, kept.kinds)
    fits = coded is not None and (coded.out, coded.in_features) == tuple(kept.shapes[prefix])
    return coded if fits else None


def keep_codes(model: Any, unpacked: Unpacked) -> bool:
    """Have projections of `model` keep their codes in place of stand-ins.

    False, and nothing is done, where a stand-in is not where it was meant to be: then numbers are needed.
    """
    linears = {name: model.get_submodule(name) for name in unpacked.coded}
    for name, linear in linears.items():
        stand_in = unpacked.tensors[f"{name}.weight"]
        if type(linear) is not nn.Linear or linear.weight.data_ptr() != stand_in.data_ptr():
            return False
    for name, linear in linears.items():
        model.set_submodule(name, CodedLinear(unpacked.coded[name], linear.bias))
    return True


def foresee_codes(
    outline: nn.Module, directory: Path, weight_format: WeightFormat, kinds: Collection[CodeKind]
) -> None:
    """Have projections of a model without weights take about what their codes will, by the files."""
    files = _names_by_file(directory)
    linears = called_linears(outline)
    for prefix, endings in _projections(list(files), weight_format).items():
        heads = [_head(files, f"{prefix}.{ending}") for ending in endings]
        is_fp8 = any(dtype == "F8_E4M3" for _, dtype in heads)
        kept = CodeKind.FP8 in kinds if is_fp8 else weight_format.is_whole and CodeKind.INT8 in kinds
        if kept and prefix in linears:
            num_bytes = sum(size for size, _ in heads)
            outline.set_submodule(prefix, foreseen_linear(linears[prefix], num_bytes))


def _head(files: dict[str, Path], name: str) -> tuple[int, str]:
    """The bytes of a tensor, and the name of its dtype, without reading it."""
    with safe_open(files[name], framework="pt") as file:
        piece = file.get_slice(name)
        dtype = str(piece.get_dtype())
        return math.prod(piece.get_shape()) * _BITS_OF.get(dtype, 32) // 8, dtype


def keep_stored(model: Any, stored: dict[str, StoredWeight]) -> None:
    """Have projections and experts of `model` keep their weights in blocks, in place of numbers."""
    for name, module in list(model.named_modules()):
        weight = stored.get(name)
        if has_read_experts(module):
            experts = _experts(name, module, stored)
            if experts is not None:
                model.set_submodule(name, StoredExperts(experts, module.act_fn))
        elif weight is not None and type(module) is nn.Linear and _are_numbers_of(weight, module.weight):
            bias = None if module.bias is None else module.bias.detach()
            model.set_submodule(name, StoredLinear(weight, bias))


def _experts(name: str, module: Any, stored: dict[str, StoredWeight]) -> ExpertWeights | None:
    """The weights of the experts `name`, which files have one by one; None where these are not all blocks."""
    count = len(module.down_proj)
    pieces = [
        [stored.get(f"{name}.{expert}.{own}") for expert in range(count)]
        for own in ("gate_proj", "up_proj", "down_proj")
    ]
    found = [[piece for piece in own if piece is not None] for own in pieces]
    if any(len(own) < count for own in found):
        return None
    weights = ExpertWeights(count, *found)
    gates, ups = module.gate_up_proj.chunk(2, dim=1)
    alike = zip(found, (gates, ups, module.down_proj), strict=True)
    are_alike = weights.fits(module) and all(
        _are_numbers_of(piece, numbers)
        for own, given in alike
        for piece, numbers in zip(own, given, strict=True)
    )
    return weights if are_alike else None


def _are_numbers_of(weight: StoredWeight, numbers: Tensor) -> bool:
    """Whether weights [out, in] are those stored, as far as a few outputs show."""
    sample = np.arange(min(_SAMPLE, weight.out))
    return numbers.shape == (weight.out, weight.in_features) and torch.equal(
        numbers[: len(sample)], weight.numbers(sample).to(numbers.dtype)
    )


def in_blocks(codes: Tensor, scales: Tensor) -> StoredWeight | None:
    """Weights codes * scales as Q4_0, Q5_0 or Q8_0, the smallest that has them exactly; None where none has.

    Each 32 inputs must have one scale, of half precision, and whole codes.
    """
    out, width = codes.shape
    if width % _BLOCK:
        return None
    codes, spread = (each.float().expand(out, width).reshape(out, -1, _BLOCK) for each in (codes, scales))
    scale = spread[..., :1]
    if not (torch.equal(spread, scale.expand_as(spread)) and torch.equal(scale.half().float(), scale)):
        return None
    least, most = float(codes.min()), float(codes.max())
    if not torch.equal(codes, codes.round()) or least < -128 or most > 127:
        return None
    half = scale.half().clone(memory_format=torch.contiguous_format).view(torch.uint8)  # [out, blocks, 2]
    made = [half]
    if least < -16 or most > 15:
        block_format = Format.Q8_0
        made.append(codes.to(torch.int8).view(torch.uint8))
    elif least < -8 or most > 7:
        block_format = Format.Q5_0
        moved = (codes + 16).to(torch.int64)
        fifths = (moved >> 4).view(out, -1, 4, 8) << torch.arange(8)
        made += [fifths.sum(-1).to(torch.uint8), _nibbles(moved & 15)]
    else:
        block_format = Format.Q4_0
        made.append(_nibbles((codes + 8).to(torch.int64)))
    blocks = torch.cat(made, dim=-1).view(out, -1).numpy()
    return StoredWeight(block_format, blocks, out, width)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes [..., 32] in bytes [..., 16], the first half of them in the low bits."""
    return (codes[..., :16] | codes[..., 16:] << 4).to(torch.uint8)


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
