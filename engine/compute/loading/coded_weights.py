"""Weights as codes of 4 or 8 bits with scales, in tensors: what a GPU keeps of a quantized model.

Here they are unpacked for each use: exact, and slow. Kernels of a device multiply with the codes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

FP8_MOST = 448.0  # the largest number of float8_e4m3fn
LEAST_LARGEST = 1e-30  # of a row's numbers: what a scale is made of where all are zero
STEPS = (64, 32, 16)  # columns that kernels multiply with at a time, all of one scale
_FP8_ROWS = 128  # outputs that share the scales of blocks


class CodeKind(Enum):
    """What codes are: integers without sign, or numbers of 8 bits (E4M3 of Micikevicius et al. 2022)."""

    INT4 = "INT4"
    INT8 = "INT8"
    FP8 = "FP8"

    @property
    def middle(self) -> int:
        """The zero point of integers that come without zero points of their own."""
        return {"INT4": 8, "INT8": 128, "FP8": 0}[self.value]


class InputRounding(NamedTuple):
    """How inputs become 8 bits before they are multiplied: `group` neighbours share a scale, 0: all of a row.

    `scale` is the one for all of them, float32 [1]; None takes that of the largest number.
    """

    group: int = 0
    scale: Tensor | None = None

    def width(self, in_features: int) -> int:
        """How many inputs share a scale."""
        return self.group or in_features


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """Weights [out, in_features], each (code - zero) * scale.

    `scales` [ceil(out / rows), groups] are for `rows` outputs and `group` inputs each; `zeros` [out, groups],
    None is `kind.middle`. INT4's `codes` are bytes [out, bytes]: of each 2 * `step` columns the first half in
    the low bits, the last ones filled up; else `codes` is [out, in_features]. With `order` [in_features] a
    column is for the input that it names. Inputs are rounded by `rounding`; None leaves them as they are.
    """

    kind: CodeKind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    in_features: int
    group: int
    rows: int = 1
    order: Tensor | None = None
    rounding: InputRounding | None = None

    @property
    def out(self) -> int:
        """How many outputs there are."""
        return len(self.codes)

    @property
    def step(self) -> int:
        """Columns that a kernel takes at a time: they share a scale."""
        step = step_of(self.group, self.in_features)
        assert step is not None, "such groups are not made"
        return step

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it keeps."""
        every = (self.codes, self.scales, self.zeros, self.order, self.rounding and self.rounding.scale)
        return tuple(each for each in every if each is not None)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(each.nbytes for each in self.tensors)

    def numbers(self) -> Tensor:
        """The weights in float32, [out, in_features]."""
        groups = torch.arange(self.in_features, device=self.codes.device) // self.group
        outputs = torch.arange(self.out, device=self.codes.device) // self.rows
        zeros = self.kind.middle if self.zeros is None else self.zeros.float()[:, groups]
        numbers = (self._codes() - zeros) * self.scales.float()[outputs][:, groups]
        if self.order is None:
            return numbers
        ordered = torch.empty_like(numbers)
        ordered[:, self.order.long()] = numbers
        return ordered

    def rounded(self, inputs: Tensor) -> Tensor:
        """What inputs [..., in_features] stand for once they are rounded, in float32."""
        if self.rounding is None:
            return inputs.float()
        codes, scales = round_inputs(inputs.flatten(0, -2), self.rounding)
        spread = scales.repeat_interleave(self.rounding.width(self.in_features), dim=1)
        return (codes.float() * spread[:, : self.in_features]).view(inputs.shape)

    def _codes(self) -> Tensor:
        """In float32, [out, in_features]."""
        if self.kind is not CodeKind.INT4:
            return self.codes.float()
        pairs = self.codes.view(self.out, -1, self.step)
        return torch.cat((pairs & 15, pairs >> 4), dim=2).view(self.out, -1)[:, : self.in_features].float()


class CodedLinear(nn.Module):
    """A projection whose weights are unpacked for each use."""

    def __init__(self, coded: CodedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.coded = coded
        self.in_features, self.out_features = coded.in_features, coded.out
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], computed in float32."""
        numbers = self.coded.numbers()
        if self.coded.rounding is None:  # as the weights of a plain module are
            numbers = numbers.to(x.dtype).float()
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(self.coded.rounded(x), numbers, bias).to(x.dtype)

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """The same with weights of `dtype`, and inputs as they are."""
        made = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        made.weight = nn.Parameter(self.coded.numbers().to(dtype), requires_grad=False)
        if self.bias is not None:
            made.bias = self.bias
        return made


def foreseen_linear(linear: nn.Linear, num_bytes: int) -> CodedLinear:
    """In an outline, without numbers, what will stand in the place of `linear` and take so many bytes."""
    out, width = linear.weight.shape
    codes = torch.empty((out, -(-num_bytes // out)), dtype=torch.uint8, device="meta")
    scales = torch.empty((out, 0), device="meta")
    return CodedLinear(CodedWeight(CodeKind.INT8, codes, scales, None, width, width), linear.bias)


def code_kinds(model: nn.Module) -> tuple[str, ...]:
    """The kinds of codes that projections of `model` have, by name; none for plain weights alone."""
    linears = (module for module in model.modules() if isinstance(module, CodedLinear))
    return tuple(sorted({linear.coded.kind.value for linear in linears}))


def most_expanded_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What the largest weights that a product unpacks take as numbers of `dtype`; 0 where there are none."""
    linears = [module for module in model.modules() if isinstance(module, CodedLinear)]
    expanded = [linear for linear in linears if linear.coded.rounding is None]
    return max((each.in_features * each.out_features * dtype.itemsize for each in expanded), default=0)


def rounds_inputs(model: nn.Module) -> bool:
    """Whether some of the projections of `model` round what they are given to 8 bits."""
    linears = (module for module in model.modules() if isinstance(module, CodedLinear))
    return any(linear.coded.rounding is not None for linear in linears)


def round_inputs(rows: Tensor, rounding: InputRounding) -> tuple[Tensor, Tensor]:
    """Rows [n, width] as float8_e4m3fn of the same shape, and scales [n, groups] in float32."""
    width = rows.shape[1]
    group = rounding.width(width)
    padded = nn.functional.pad(rows.float(), (0, -width % group)).view(len(rows), -1, group)
    if rounding.scale is None:
        scales = padded.abs().amax(2).clamp(min=LEAST_LARGEST) / FP8_MOST
    else:
        scales = rounding.scale.expand(len(rows), padded.shape[1])
    codes = (padded / scales[..., None]).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return codes.view(len(rows), -1)[:, :width].contiguous(), scales.contiguous()


def step_of(group: int, in_features: int) -> int | None:
    """The columns that a kernel may take at a time where `group` share a scale; None where it cannot."""
    if group >= in_features:
        return STEPS[0]
    return next((step for step in STEPS if group % step == 0), None)


def integer_codes(codes: Tensor, scales: Tensor, order: Tensor | None = None) -> CodedWeight | None:
    """Weights codes * scales as the fewest bits that hold them exactly; None where 8 do not.

    Both are [out, in_features] or spread to it, whole codes less their zero points. With `order`, that of the
    inputs, neighbours in that order share scales.
    """
    out, width = codes.shape
    if order is not None:
        codes, scales = codes[:, order], scales.expand(out, width)[:, order]
    group = _run(scales, dim=1) if scales.shape[1] > 1 else width
    if step_of(group, width) is None or not torch.equal(codes, codes.round()):
        return None
    filled = torch.cat((codes, codes[:, -1:].expand(-1, -width % group)), dim=1).float().view(out, -1, group)
    least, most = filled.amin(2), filled.amax(2)  # [out, groups]
    by = _narrowest(scales[:, ::group].expand(out, -1))
    for kind in (CodeKind.INT4, CodeKind.INT8):
        middle = kind.middle
        if float(least.min()) >= -middle and float(most.max()) < middle:
            return _packed(kind, codes + middle, by, None, group, order)
        if float((most - least).max()) < 2 * middle:
            zeros = -least
            moved = codes + zeros.repeat_interleave(group, dim=1)[:, :width]
            return _packed(kind, moved, by, zeros.half(), group, order)
    return None


def float_codes(codes: Tensor, scales: Tensor, rounding: InputRounding | None = None) -> CodedWeight | None:
    """Weights codes * scales, of codes float8_e4m3fn [out, in_features]; None where blocks are too narrow.

    `scales` is of that shape or spread to it.
    """
    out, width = codes.shape
    group = _run(scales, dim=1) if scales.shape[1] > 1 else width
    rows = _run(scales, dim=0) if scales.shape[0] > 1 and group < width else 1
    if rows == out or rows % _FP8_ROWS == 0:
        rows = math.gcd(rows, _FP8_ROWS)
    if step_of(group, width) is None:
        return None
    if rounding is not None and step_of(rounding.width(width), width) is None:
        return None
    by = scales.float()[::rows, ::group].expand(-(-out // rows), -1).contiguous()
    return CodedWeight(CodeKind.FP8, codes.contiguous(), by, None, width, group, rows, rounding=rounding)


def round_weights(weights: Tensor, kind: CodeKind, group: int) -> CodedWeight:
    """Weights [out, in_features] as integers, each `group` with a scale and, of 4 bits, a zero point.

    8 bits are symmetric about zero. `in_features` must be divisible by `group`.
    """
    out, width = weights.shape
    numbers = weights.float().view(out, -1, group)
    if kind is CodeKind.INT4:
        least, most = numbers.amin(2), numbers.amax(2)
        scales = ((most - least) / 15).clamp(min=1e-7).half()
        zeros = (-least / scales.float()).half()
    else:
        scales = (numbers.abs().amax(2) / 127).clamp(min=1e-7).half()
        zeros = None
    from_zero = zeros.float() if zeros is not None else torch.full_like(scales, kind.middle).float()
    codes = (numbers / scales.float()[..., None] + from_zero[..., None]).round()
    codes = codes.clamp(0, 2 * kind.middle - 1).view(out, width)
    return _packed(kind, codes, scales, zeros, group, None)


def are_joinable(weights: Sequence[CodedWeight]) -> bool:
    """Whether all are for the same inputs and differ in nothing but codes, scales and zero points."""
    alike = all(_is_like(weights[0], each) for each in weights[1:])
    return alike and not any(each.out % each.rows for each in weights[:-1])


def joined(weights: Sequence[CodedWeight]) -> CodedWeight:
    """The outputs of all, which must be joinable, behind one another."""
    zeros = None
    if any(each.zeros is not None for each in weights):
        zeros = torch.cat([_zeros(each) for each in weights])
    return replace(
        weights[0],
        codes=torch.cat([each.codes for each in weights]),
        scales=torch.cat([each.scales for each in weights]),
        zeros=zeros,
    )


def _is_like(one: CodedWeight, other: CodedWeight) -> bool:
    """Whether both read the same inputs in the same way, and are laid out alike."""
    alike = ("kind", "in_features", "group", "rows")
    return (
        all(getattr(one, name) == getattr(other, name) for name in alike)
        and one.scales.dtype is other.scales.dtype
        and _same(one.order, other.order)
        and (one.rounding and one.rounding.group) == (other.rounding and other.rounding.group)
        and _same(one.rounding and one.rounding.scale, other.rounding and other.rounding.scale)
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _zeros(weight: CodedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    shape = (weight.out, weight.scales.shape[1])
    return torch.full(shape, weight.kind.middle, dtype=torch.float16, device=weight.codes.device)


def _packed(
    kind: CodeKind, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, order: Tensor | None
) -> CodedWeight:
    """The record of codes [out, in_features], numbers from 0 on."""
    out, width = codes.shape
    made = codes.to(torch.uint8)
    if kind is CodeKind.INT4:
        step = step_of(group, width)
        assert step is not None
        pairs = nn.functional.pad(made, (0, -width % (2 * step))).view(out, -1, 2, step)
        made = (pairs[:, :, 0] | pairs[:, :, 1] << 4).view(out, -1)
    order = None if order is None else order.int()
    return CodedWeight(kind, made.contiguous(), scales, zeros, width, group, order=order)


def _narrowest(scales: Tensor) -> Tensor:
    """The scales in as few bits as hold them."""
    halves = (scales.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((each for each in halves if torch.equal(each.float(), scales)), scales).contiguous()


def _run(scales: Tensor, dim: int) -> int:
    """How many neighbours at least have the same scales, along rows (0) or columns (1)."""
    before, behind = (
        scales.narrow(dim, 0, scales.shape[dim] - 1),
        scales.narrow(dim, 1, scales.shape[dim] - 1),
    )
    changes = (before != behind).any(1 - dim).nonzero().flatten().tolist()
    return math.gcd(*(place + 1 for place in changes)) if changes else scales.shape[dim]
