"""Formats in which safetensors checkpoints store quantized weights, and the numbers that they stand for.

Which one a checkpoint has, its `quantization_config` says, which is read as data: no package of any format is
needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.compute.loading.coded_weights import (
    CodedWeight,
    CodeKind,
    InputRounding,
    float_codes,
    integer_codes,
)
from engine.compute.loading.model_files import first_line
from engine.compute.loading.stored_weights import FLOAT_SPAN, Stored, StoredFloats, StoredMxfp4

Parts = Mapping[str, Tensor]  # the tensors of one projection, by the last part of their names

# How the columns of eight neighbours lie in 32 bits of AWQ.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_COMPRESSED = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"})
# What four bits of MXFP4 stand for.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ROUNDED_INPUTS = "inputs are not rounded to 8 bits"


class FormatRefused(Exception):
    """Weights that cannot be served as they are stored; the message is part of a sentence that says why."""


class InputScheme(NamedTuple):
    """That inputs are numbers of 8 bits, `group` neighbours with one scale, 0: all of a row.

    A fixed scale stands beside the weights.
    """

    group: int = 0
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How projections are stored: one with a tensor `marker` is quantized, `endings` are all it may have.

    `unpack` gives each weight's code [out, in] and what one is worth, of that shape or spread to it; `note`
    says what of the format is left out. `keep` gives the weights as they are where a CPU's kernels multiply
    them so, None for others; without it, and where it gives none, only what they stand for is known. `joint`
    stands between a projection's name and those of its tensors. `inputs` says how inputs are to be rounded to
    numbers of 8 bits; None leaves them, or rounds to integers, which nothing here does.
    """

    name: str
    marker: str
    endings: tuple[str, ...]
    unpack: Callable[[Parts], tuple[Tensor, Tensor]]
    note: str = ""
    keep: Callable[[Parts], Stored | None] | None = None
    joint: str = "."
    inputs: InputScheme | None = None
    is_whole: bool = True  # codes are whole numbers or numbers of 8 bits, not places in a table

    def numbers(self, parts: Parts) -> Tensor:
        """The weights [out, in] in float32."""
        codes, scales = self.unpack(parts)
        return (codes * scales).float()

    def kept(self, parts: Parts) -> Stored | None:
        """See `keep`."""
        return None if self.keep is None else self.keep(parts)

    def weight_name(self, projection: str) -> str:
        """What the model calls the weights of a projection."""
        return f"{projection}.weight" if self.joint == "." else projection

    def coded(self, parts: Parts, kinds: Collection[CodeKind]) -> CodedWeight | None:
        """The weights as codes of one of `kinds`, on the parts' device; None where they do not fit one."""
        codes, scales = self.unpack(parts)
        scales.broadcast_to(codes.shape)  # raises where a scale is missing, which a kernel would read beyond
        stored = parts.get("weight")
        if stored is None or stored.dtype is not torch.float8_e4m3fn:
            made = integer_codes(codes, scales, _order(parts))
        elif self.inputs is None:
            made = float_codes(stored, scales)
        else:
            rounding = _rounding(self.inputs, parts)
            made = None if rounding is None else float_codes(stored, scales, rounding)
        return made if made is not None and made.kind in kinds else None

    def words(self, kinds: Collection[CodeKind] = ()) -> str:
        """The format, and what of it is left out; codes of `kinds` are multiplied with as they are."""
        note = self.note
        if self.inputs is not None and CodeKind.FP8 in kinds:
            note = "inputs are rounded to 8 bits as it says"
        return f"{self.name} ({note})" if note else self.name


def read_weight_format(settings: Mapping[str, Any]) -> WeightFormat:
    """The format that a `quantization_config` describes. Raises FormatRefused."""
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _READERS:
        raise FormatRefused(
            f"its weights are quantized by {method!r}, which is not known (quantization_config)"
        )
    try:
        return _READERS[method](settings)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of a value that no format has
        raise FormatRefused(
            f"its quantization_config is not what {method} has ({first_line(error)})"
        ) from error


def unpack_integers(words: Tensor, bits: int) -> Tensor:
    """Integers without sign from int32 [..., n], the lowest bits first: [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _read_gptq(settings: Mapping[str, Any]) -> WeightFormat:
    bits, group = int(settings.get("bits", 4)), int(settings.get("group_size", 128))
    if bits not in (2, 4, 8):
        raise FormatRefused(
            f"its weights are GPTQ of {bits} bits, served are 2, 4 and 8 (quantization_config)"
        )
    # The first version of the format stores zero points less one.
    above = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def unpack(parts: Parts) -> tuple[Tensor, Tensor]:
        codes = unpack_integers(parts["qweight"].T.contiguous(), bits)  # [out, in]
        zeros = unpack_integers(parts["qzeros"], bits).T + above  # [out, groups]
        scales = parts["scales"].float().T
        groups = parts.get("g_idx")
        if groups is None:
            groups = torch.arange(codes.shape[1]) // (group if group > 0 else codes.shape[1])
        groups = groups.long()
        return codes - zeros[:, groups], scales[:, groups]

    order = ", inputs in the order of their weight" if settings.get("desc_act") else ""
    endings = ("qweight", "qzeros", "scales", "g_idx")
    return WeightFormat(f"GPTQ, {bits} bits {_groups(group)}{order}", "qweight", endings, unpack)


def _read_awq(settings: Mapping[str, Any]) -> WeightFormat:
    bits, group = int(settings.get("bits", 4)), int(settings.get("group_size", 128))
    version = str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise FormatRefused(
            f"its weights are AWQ of {bits} bits in version {version!r}, served are 4 bits of 'gemm' "
            "(quantization_config)"
        )

    def columns(words: Tensor) -> Tensor:
        codes = unpack_integers(words, 4)
        return codes.view(len(codes), -1, 8)[..., _AWQ_ORDER].flatten(-2)

    def unpack(parts: Parts) -> tuple[Tensor, Tensor]:
        codes, zeros, scales = columns(parts["qweight"]), columns(parts["qzeros"]), parts["scales"].float()
        width = codes.shape[0] // scales.shape[0]
        spread = (each.repeat_interleave(width, dim=0) for each in (zeros, scales))  # [in, out]
        zero, scale = spread
        return (codes - zero).T, scale.T

    return WeightFormat(f"AWQ, 4 bits {_groups(group)}", "qweight", ("qweight", "qzeros", "scales"), unpack)


def _read_compressed_tensors(settings: Mapping[str, Any]) -> WeightFormat:
    groups = [dict(group) for group in (settings.get("config_groups") or {}).values()]
    formats = {str(group.get("format") or settings.get("format")) for group in groups}
    schemes = [dict(group.get("weights") or {}) for group in groups]
    bits = sorted({int(scheme.get("num_bits", 8)) for scheme in schemes})
    refused = sorted(formats - _COMPRESSED) or [f"of {each} bits" for each in bits if each not in (2, 4, 8)]
    if refused or not groups:
        raise FormatRefused(
            f"its weights are compressed-tensors {', '.join(refused) or 'without config_groups'}, served are "
            f"{', '.join(sorted(_COMPRESSED))} of 2, 4 or 8 bits (quantization_config)"
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise FormatRefused(f"its weights are compressed-tensors of {sparsity} (quantization_config)")
    if any((settings.get("transform_config") or {}).values()):
        raise FormatRefused(
            "its weights are compressed-tensors with a transform_config (quantization_config)"
        )
    blocks = [tuple(scheme["block_structure"]) for scheme in schemes if scheme.get("strategy") == "block"]
    if len(set(blocks)) > 1:
        raise FormatRefused("its weights have blocks of several sizes (quantization_config)")

    def unpack(parts: Parts) -> tuple[Tensor, Tensor]:
        scale, zero, packed = (
            parts["weight_scale"].float(),
            parts.get("weight_zero_point"),
            parts.get("weight_packed"),
        )
        if packed is None:
            codes = parts["weight"].float()
        else:
            out, width = (int(size) for size in parts["weight_shape"])
            each = next(each for each in bits if -(-width * each // 32) == packed.shape[1])
            codes = (unpack_integers(packed, each)[:, :width] - (1 << each - 1)).float()
            if zero is not None and zero.dtype is torch.int32:
                zero = unpack_integers(zero.T.contiguous(), each).T[:out] - (1 << each - 1)
        groups = parts.get("weight_g_idx")
        if groups is not None and not (groups < 0).any():
            spread = [None if part is None else part[:, groups.long()] for part in (scale, zero)]
        else:
            block = blocks[0] if blocks else None
            spread = [None if part is None else _spread(part, codes.shape, block) for part in (scale, zero)]
        by, less = spread
        assert by is not None
        return codes if less is None else codes - less, by

    rounds_inputs = any(group.get("input_activations") for group in groups)
    endings = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        "input_scale",
    )
    listed = ", ".join(sorted(formats)) + f", {' and '.join(map(str, bits))} bits"
    note = _ROUNDED_INPUTS if rounds_inputs else ""
    inputs = {_compressed_inputs(group.get("input_activations") or {}) for group in groups}
    are_floats = {scheme.get("type") for scheme in schemes} == {"float"}
    scheme = inputs.pop() if len(inputs) == 1 and are_floats else None
    keep = _keep_floats(blocks)
    return WeightFormat(
        f"compressed-tensors, {listed}", "weight_scale", endings, unpack, note, keep, inputs=scheme
    )


def _compressed_inputs(scheme: Mapping[str, Any]) -> InputScheme | None:
    """How inputs become numbers of 8 bits; None where they do not, or become integers.

    A scale for all rows of a step becomes one for each row: no row may depend on its neighbours.
    """
    if scheme.get("type") != "float" or int(scheme.get("num_bits", 8)) != 8:
        return None
    group = scheme.get("group_size") if scheme.get("strategy") in ("group", "block") else None
    return InputScheme(int(group or 0), is_fixed=not scheme.get("dynamic"))


def _keep_floats(blocks: Sequence[tuple[int, ...]]) -> Callable[[Parts], Stored | None]:
    """What keeps compressed-tensors' floats of 8 bits."""

    def keep(parts: Parts) -> Stored | None:
        if not parts.keys() <= {"weight", "weight_scale", "input_scale"}:
            return None
        return _kept_floats(parts["weight"], parts["weight_scale"].float(), blocks[0] if blocks else None)

    return keep


def _read_bitsandbytes(settings: Mapping[str, Any]) -> WeightFormat:
    if not settings.get("load_in_4bit"):
        raise FormatRefused(
            "its weights are bitsandbytes of 8 bits, served are those of 4 (quantization_config)"
        )
    kind = str(settings.get("bnb_4bit_quant_type", "fp4"))
    state_name = f"weight.quant_state.bitsandbytes__{kind}"

    def unpack(parts: Parts) -> tuple[Tensor, Tensor]:
        state = json.loads(bytes(parts[state_name].tolist()))
        largest = parts["weight.absmax"]
        if "weight.nested_absmax" in parts:
            nested = parts["weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])
            codes = parts["weight.nested_quant_map"].float()[largest.long()]
            largest = codes * nested[: len(codes)] + state["nested_offset"]
        packed = parts["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
        values = parts["weight.quant_map"].float()[codes.long()]
        blocks = largest.float().repeat_interleave(state["blocksize"])[: len(values)]
        count = torch.Size(state["shape"]).numel()
        return values[:count].view(state["shape"]), blocks[:count].view(state["shape"])

    names = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    endings = ("weight", *(f"weight.{name}" for name in names), state_name)
    return WeightFormat(f"bitsandbytes {kind}", state_name, endings, unpack, is_whole=False)


def _read_fp8(settings: Mapping[str, Any]) -> WeightFormat:
    size = settings.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))

    def scale_of(parts: Parts) -> Tensor:
        scale = parts["weight_scale_inv"]
        return _powers(scale) if scale.dtype is torch.uint8 else scale.float()

    def unpack(parts: Parts) -> tuple[Tensor, Tensor]:
        weight = parts["weight"].float()
        return weight, _spread(scale_of(parts), weight.shape, block)

    def keep(parts: Parts) -> Stored | None:
        return _kept_floats(parts["weight"], scale_of(parts), block)

    name = "FP8, a scale each" if block is None else f"FP8, a scale for {block[0]} x {block[1]}"
    inputs = InputScheme(
        0 if block is None else block[1], is_fixed=settings.get("activation_scheme") == "static"
    )
    endings = ("weight", "weight_scale_inv", "activation_scale")
    return WeightFormat(name, "weight_scale_inv", endings, unpack, _ROUNDED_INPUTS, keep, inputs=inputs)


def _read_mxfp4(_settings: Mapping[str, Any]) -> WeightFormat:
    """OCP's microscaling format as gpt-oss has it: of all experts of a layer, [experts, out, in]."""

    def unpack(parts: Parts) -> tuple[Tensor, Tensor]:
        codes, exponents = parts["blocks"], parts["scales"]  # [experts, out, blocks, 16] and without the last
        table = torch.tensor(_E2M1).bfloat16()
        numbers = table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-3).int()]
        # The model has them the other way round.
        return numbers.mT, _powers(exponents).bfloat16().repeat_interleave(32, dim=-1).mT

    def keep(parts: Parts) -> Stored | None:
        return StoredMxfp4(parts["blocks"], parts["scales"])

    return WeightFormat("MXFP4", "blocks", ("blocks", "scales"), unpack, keep=keep, joint="_")


_READERS: dict[Any, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "bitsandbytes": _read_bitsandbytes,
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
}


def _powers(exponents: Tensor) -> Tensor:
    """Of two, by their exponents in a byte."""
    return torch.exp2(exponents.float() - 127)


def _kept_floats(codes: Tensor, scale: Tensor, block: tuple[int, ...] | None) -> StoredFloats | None:
    """Such weights as they are, where kernels have a scale for as many; none of them may be NaN."""
    if codes.dtype is not torch.float8_e4m3fn or codes.shape[1] % 2:
        return None
    out, spans = codes.shape[0], -(-codes.shape[1] // FLOAT_SPAN)
    rows = columns = 0
    if scale.ndim == 2 and scale.numel() > 1:
        rows, columns = block or (-(-out // scale.shape[0]), -(-codes.shape[1] // scale.shape[1]))
        if scale.shape[1] > 1 and columns % FLOAT_SPAN:
            return None
    if bool(((codes.view(torch.uint8) & 127) == 127).any()):
        return None
    by_span = _spread(scale, torch.Size((out, spans)), (rows, -(-columns // FLOAT_SPAN)))
    return StoredFloats(codes, by_span.expand(out, spans).contiguous())


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, ...] | None) -> Tensor:
    """What one, each row, each group of a row or each block of the weights has, for each of them."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1:
        return scale[:, None]
    rows, columns = (
        block if block is not None else (-(-shape[0] // scale.shape[0]), -(-shape[1] // scale.shape[1]))
    )
    by_row = scale.repeat_interleave(rows, dim=0)[: shape[0]]
    return by_row.repeat_interleave(columns, dim=1)[:, : shape[1]]


def _order(parts: Parts) -> Tensor | None:
    """The inputs, those of a scale together; None where they lie so."""
    groups = parts.get("g_idx", parts.get("weight_g_idx"))
    if groups is None or (groups < 0).any() or (groups[1:] >= groups[:-1]).all():
        return None
    return groups.argsort(stable=True)


def _rounding(scheme: InputScheme, parts: Parts) -> InputRounding | None:
    """How inputs of this projection are rounded; None where a fixed scale is not one."""
    if not scheme.is_fixed:
        return InputRounding(scheme.group)
    scale = parts.get("input_scale", parts.get("activation_scale"))
    if scale is None or scale.numel() != 1:
        return None
    return InputRounding(scale=scale.float().reshape(1))


def _groups(size: int) -> str:
    return f"in groups of {size}" if size > 0 else "with a scale for each output"
