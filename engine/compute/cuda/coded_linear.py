"""TritonLinear: a projection that multiplies with codes of 4 or 8 bits, on a CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import nn

from engine.compute.cuda.coded_kernels import (
    coded_product_kernel,
    expand_kernel,
    merge_parts_kernel,
    round_kernel,
)
from engine.compute.cuda.coded_layout import (
    MOST_TILED,
    CodedShape,
    ProductLayout,
    large_layout,
    tiled_layout,
)
from engine.compute.loading.coded_weights import CodedLinear, CodedWeight, joined
from engine.compute.native.closeness import is_close

log = logging.getLogger("slipstream.model")

_STAGES = 3  # steps of codes and inputs that are on their way at once
_MERGED = 1024  # outputs that one program merges
_EXPANDED = 64  # outputs that one program unpacks
_TILED_ROWS, _MANY_ROWS = (1, 20, 40), MOST_TILED + 1  # that are checked: of each tile, and beyond


class TritonLinear(CodedLinear):
    """A projection over coded weights, equal to CodedLinear up to the order of sums.

    Of up to MOST_TILED rows each has the same bits in any company. More are multiplied by torch: with the
    numbers that the codes stand for, or where inputs are rounded by `torch._scaled_mm`, and where that does
    not take them by the kernel again.
    """

    def __init__(self, coded: CodedWeight, bias: torch.Tensor | None, *, scales_rows: bool = True) -> None:
        super().__init__(coded, bias)
        self._shape = CodedShape.of(coded)
        self.scales_rows = scales_rows and _may_scale_rows(coded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        return self._product(rows, None).view(*x.shape[:-1], self.out_features)

    def added(self, rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """The product of `rows` [n, in_features] and `total` [n, out_features], rounded once."""
        return self._product(rows, total)

    def _product(self, rows: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        rows = rows.contiguous()
        if not len(rows):
            return rows.new_empty(0, self.out_features)
        scales = None
        inputs = rows
        if self.coded.rounding is not None:
            inputs, scales = round_rows(rows, self.coded)
        if len(rows) <= MOST_TILED:
            layout = tiled_layout(self.coded, len(rows))
        elif scales is None:
            return self._of_numbers(rows, added)
        elif self.scales_rows:
            return self._of_scaled_rows(inputs, scales, added, rows.dtype)
        else:
            layout = large_layout(self.coded, rows.itemsize)
        return self._launch((inputs, scales), added, rows.new_empty(len(rows), self.out_features), layout)

    def _of_numbers(self, rows: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        """By the weights as numbers, which are there for the time of the product."""
        numbers = expanded(self.coded, rows.dtype)
        if added is None:
            return nn.functional.linear(rows, numbers, self.bias)
        if self.bias is not None:
            added = added + self.bias
        return torch.addmm(added, rows, numbers.t())

    def _of_scaled_rows(
        self, inputs: torch.Tensor, scales: torch.Tensor, added: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """By torch's product of numbers of 8 bits, with a scale for each row and each output."""
        product: torch.Tensor = torch._scaled_mm(
            inputs,
            self.coded.codes.t(),
            scale_a=scales,
            scale_b=self.coded.scales.t(),
            bias=self.bias,
            out_dtype=dtype,
            use_fast_accum=False,
        )
        return product if added is None else product.add_(added)

    def _launch(
        self,
        given: tuple[torch.Tensor, torch.Tensor | None],
        added: torch.Tensor | None,
        product: torch.Tensor,
        layout: ProductLayout,
    ) -> torch.Tensor:
        coded, (inputs, scales) = self.coded, given
        count, out = product.shape
        parts = inputs
        if layout.is_split:
            parts = torch.empty((layout.num_parts, count, out), dtype=torch.float32, device=inputs.device)
        bias, total = _or(self.bias, product), _or(added, product)
        options: dict[str, Any] = {"HAS_BIAS": self.bias is not None, "HAS_ADDED": added is not None}
        coded_product_kernel[layout.grid(count, out)](
            inputs,
            _or(scales, inputs),
            coded.codes,
            coded.scales,
            _or(coded.zeros, coded.codes),
            _or(coded.order, coded.codes),
            bias,
            total,
            product,
            parts,
            count,
            out,
            WEIGHT=self._shape,
            LAYOUT=layout,
            **options,
            num_warps=layout.num_warps,
            num_stages=_STAGES,
        )
        if layout.is_split:
            chunk = min(_MERGED, triton.next_power_of_2(out))
            merge_parts_kernel[(count * triton.cdiv(out, chunk),)](
                parts, bias, total, product, count, out, NUM_PARTS=layout.num_parts, CHUNK=chunk, **options
            )
        return product


def joined_linear(linears: Sequence[TritonLinear]) -> TritonLinear:
    """One projection with the outputs of all, whose weights must be joinable."""
    coded = joined([linear.coded for linear in linears])
    scales_rows = all(linear.scales_rows for linear in linears)
    return TritonLinear(coded, joined_bias(linears, coded.scales), scales_rows=scales_rows)


def joined_bias(linears: Sequence[Any], like: torch.Tensor) -> torch.Tensor | None:
    """What several projections add, zeros where one adds nothing; None if none does. On `like`'s device."""
    given = [linear.bias for linear in linears if linear.bias is not None]
    if not given:
        return None
    zeros = {"dtype": given[0].dtype, "device": like.device}
    return torch.cat(
        [
            torch.zeros(linear.out_features, **zeros) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def round_rows(rows: torch.Tensor, coded: CodedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_inputs`, by the rounding of a weight that has one, in one launch."""
    assert coded.rounding is not None
    count, width = rows.shape
    group = coded.rounding.width(width)
    groups = triton.cdiv(width, group)
    codes = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty((count, groups), dtype=torch.float32, device=rows.device)
    padded = triton.next_power_of_2(group)
    round_kernel[(count * groups,)](
        rows,
        _or(coded.rounding.scale, scales),
        codes,
        scales,
        WIDTH=width,
        GROUP=group,
        PADDED=padded,
        HAS_FIXED=coded.rounding.scale is not None,
        num_warps=8 if padded > 4096 else 4 if padded > 512 else 1,
    )
    return codes, scales


def expanded(coded: CodedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights as numbers of `dtype`, [out, in_features], in one launch."""
    numbers = torch.empty((coded.out, coded.in_features), dtype=dtype, device=coded.codes.device)
    chunks = triton.cdiv(coded.codes.shape[1], coded.step)
    expand_kernel[(triton.cdiv(coded.out, _EXPANDED) * chunks,)](
        coded.codes,
        coded.scales,
        _or(coded.zeros, coded.codes),
        _or(coded.order, coded.codes),
        numbers,
        coded.out,
        WEIGHT=CodedShape.of(coded),
        STEP=coded.step,
        OUTS=_EXPANDED,
    )
    return numbers


@torch.inference_mode()
def equal_linear(original: CodedLinear, dtype: torch.dtype) -> TritonLinear | None:
    """The projection on kernels; None unless it answers as `original` does, for any number of rows.

    Where only torch's product of 8 bits does not, it is left out. Raises whatever a compiler or driver does.
    """
    made = TritonLinear(original.coded, original.bias)
    if all(_is_equal(made, original, count, dtype) for count in _TILED_ROWS):
        if _runs_equal(made, original, dtype):
            return made
        made.scales_rows = False
        if _is_equal(made, original, _MANY_ROWS, dtype):
            return made
    return None


def _runs_equal(made: TritonLinear, original: CodedLinear, dtype: torch.dtype) -> bool:
    """Whether many rows are equal; not where torch refuses to multiply them on this device."""
    try:
        return _is_equal(made, original, _MANY_ROWS, dtype)
    except (RuntimeError, ValueError, NotImplementedError) as reason:
        if not made.scales_rows:
            raise
        log.debug("torch does not multiply numbers of 8 bits here: %s", str(reason).splitlines()[0])
        return False


def _is_equal(made: TritonLinear, original: CodedLinear, num_rows: int, dtype: torch.dtype) -> bool:
    codes = original.coded.codes
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, original.in_features, generator=generator).to(codes.device, dtype)
    return is_close(made(rows), original(rows))


def _may_scale_rows(coded: CodedWeight) -> bool:
    """Whether rounded inputs and weights have the scales and sizes that `torch._scaled_mm` is made for."""
    return (
        coded.rounding is not None
        and coded.rounding.group == 0
        and coded.rows == 1
        and coded.scales.shape[1] == 1
        and coded.in_features % 16 == 0
        and coded.out % 16 == 0
    )


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """What a kernel gets that reads none: any tensor."""
    return other if tensor is None else tensor
