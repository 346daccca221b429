"""The weights of a quantized safetensors checkpoint, unpacked projection by projection as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Format
from safetensors import safe_open
from torch import Tensor, nn

from engine.compute.loading.coded_weights import CodedLinear, CodedWeight, CodeKind, foreseen_linear
from engine.compute.loading.model_files import first_line, weight_files
from engine.compute.loading.stored_places import StoredPlaces, find_stored_places
from engine.compute.loading.stored_weights import Stored, StoredMxfp4, StoredWeight
from engine.compute.loading.weight_formats import Parts, WeightFormat
from engine.compute.native.families import coded_linears
from engine.errors import StartRefused

_BLOCK = 32  # inputs with one scale
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
    """Every tensor by its name in the model, and what stands in place of some of its modules.

    Of projections whose codes are kept `tensors` has a stand-in without memory, which is nobody else's;
    `expanded` are those that became numbers.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    places: StoredPlaces = field(default_factory=StoredPlaces)
    coded: dict[str, CodedWeight] = field(default_factory=dict)
    expanded: list[str] = field(default_factory=list)


def unpack_files(
    directory: Path,
    weight_format: WeightFormat,
    dtype: torch.dtype,
    wanted: Callable[[str], bool] = lambda _: True,
    outline: nn.Module | None = None,
    kept: KeptCodes = NO_CODES,
) -> Unpacked:
    """The checkpoint in `directory`, its quantized weights as numbers of `dtype`, or as codes where `kept`.

    Only tensors of `wanted` names are read. With the model's `outline`, weights that kernels multiply as they
    are stay so, and tensors of no size stand for them. Raises StartRefused for what does not fit the format.
    """
    files = _OpenFiles(directory, wanted)
    unpacked = Unpacked()
    found = unpacked.tensors
    stored: dict[str, Stored] = {}
    for prefix, endings in _projections(files.names, weight_format).items():
        parts = {ending: files.take(f"{prefix}{weight_format.joint}{ending}") for ending in endings}
        try:
            if (coded := _coded(prefix, parts, weight_format, kept)) is not None:
                unpacked.coded[prefix] = coded
                found[f"{prefix}.weight"] = torch.zeros((), dtype=dtype).expand(kept.shapes[prefix])
                continue
            as_stored, numbers = _read_projection(parts, weight_format, dtype, outline is not None)
        except Exception as error:  # a damaged file fails in any of a dozen ways
            raise StartRefused(
                f"{directory}: {prefix} is not stored as {weight_format.name} ({first_line(error)})."
            ) from error
        if as_stored is not None:
            stored[prefix] = as_stored
        if numbers is not None:
            unpacked.expanded.append(prefix)
            found[weight_format.weight_name(prefix)] = numbers
    found.update(_plain_tensors(files, directory, weight_format))
    if outline is not None:
        unpacked.places = find_stored_places(outline, stored, dtype)
        for prefix in stored.keys() - unpacked.places.taken:
            found[weight_format.weight_name(prefix)] = _as_parameter(stored[prefix]).to(dtype)
        found.update(unpacked.places.placeholders)
    return unpacked


def _plain_tensors(files: _OpenFiles, directory: Path, weight_format: WeightFormat) -> dict[str, Tensor]:
    """What no projection has taken. Raises StartRefused for codes without a scale."""
    found: dict[str, Tensor] = {}
    for name in list(files.names):
        if name.endswith(tuple(f".{ending}" for ending in _UNUSED)):
            continue
        tensor = found[name] = files.take(name)
        is_code = tensor.itemsize == 1 or not tensor.is_floating_point()
        # Of experts that are one tensor the name ends otherwise, and floats of a byte are never all there is.
        if is_code and (name.endswith("weight") or tensor.is_floating_point()):
            raise StartRefused(f"{directory}: {name} has no scale, as {weight_format.name} would give it.")
    return found


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
    files = _OpenFiles(directory, lambda _: True)
    linears = coded_linears(outline)
    for prefix, endings in _projections(files.names, weight_format).items():
        heads = [files.head(f"{prefix}{weight_format.joint}{ending}") for ending in endings]
        is_fp8 = any(dtype == "F8_E4M3" for _, dtype in heads)
        kept = CodeKind.FP8 in kinds if is_fp8 else weight_format.is_whole and CodeKind.INT8 in kinds
        if kept and prefix in linears:
            num_bytes = sum(size for size, _ in heads)
            outline.set_submodule(prefix, foreseen_linear(linears[prefix], num_bytes))


def foresee_stored(
    outline: nn.Module, directory: Path, weight_format: WeightFormat, dtype: torch.dtype
) -> int:
    """About the bytes that are saved where a CPU's kernels multiply weights as stored, not as `dtype`."""
    if weight_format.keep is None:
        return 0
    files = _OpenFiles(directory, lambda _: True)
    parameters = dict(outline.named_parameters())
    replaced: dict[str, Tensor] = {}
    num_bytes = 0
    for prefix, endings in _projections(files.names, weight_format).items():
        experts = prefix.rpartition(".")[0].rpartition(".")[0]  # where a file has them one by one
        names = [weight_format.weight_name(prefix), f"{experts}.gate_up_proj", f"{experts}.down_proj"]
        found = {name: parameters[name] for name in names if name in parameters}
        if found:
            replaced |= found
            num_bytes += sum(files.head(f"{prefix}{weight_format.joint}{each}")[0] for each in endings)
    return sum(each.numel() for each in replaced.values()) * dtype.itemsize - num_bytes


def _read_projection(
    parts: Parts, weight_format: WeightFormat, dtype: torch.dtype, keeps: bool
) -> tuple[Stored | None, Tensor | None]:
    """One projection as it is stored, if it `keeps` that and can, else as numbers."""
    kept = weight_format.kept(parts) if keeps else None
    if kept is not None:
        return kept, None
    codes, scales = weight_format.unpack(parts)
    if keeps and (blocks := in_blocks(codes, scales)) is not None:
        return blocks, None
    return None, (codes * scales).to(dtype)


def _as_parameter(weight: Stored) -> Tensor:
    """The numbers as the model has them, which has gpt-oss's experts the other way round."""
    numbers = weight.numbers()
    if isinstance(weight, StoredMxfp4):
        return numbers.view(*weight.codes.shape[:-2], -1).mT
    return numbers


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


def _projections(names: Collection[str], weight_format: WeightFormat) -> dict[str, list[str]]:
    """The quantized projections, each with the endings that it has."""
    joint = weight_format.joint
    marker = f"{joint}{weight_format.marker}"
    known, prefixes = set(names), [name.removesuffix(marker) for name in names if name.endswith(marker)]
    return {
        prefix: [ending for ending in weight_format.endings if f"{prefix}{joint}{ending}" in known]
        for prefix in prefixes
    }


class _OpenFiles:
    """The tensors of a checkpoint that are yet to be taken; each file is mapped once for all of its own."""

    def __init__(self, directory: Path, wanted: Callable[[str], bool]) -> None:
        self._files: dict[str, Any] = {}
        for path in weight_files(directory):
            file: Any = safe_open(path, framework="pt")
            self._files.update({name: file for name in file.keys() if wanted(name)})  # noqa: SIM118 - no mapping

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def take(self, name: str) -> Tensor:
        """Once."""
        tensor: Tensor = self._files.pop(name).get_tensor(name)
        return tensor

    def head(self, name: str) -> tuple[int, str]:
        """The bytes of a tensor, and the name of its dtype, without reading it."""
        piece = self._files[name].get_slice(name)
        dtype = str(piece.get_dtype())
        return math.prod(piece.get_shape()) * _BITS_OF.get(dtype, 32) // 8, dtype
