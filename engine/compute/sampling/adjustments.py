"""What a request does to its logits before temperature: bias, allowed and banned tokens, penalties.

Each row's data is checked and laid out on the host by itself, so that bad data ends that row only; then each
kind is applied to all rows at once, by operations that need no answer from the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from engine.plan.grammar import MaskOf, TokenMask
from engine.plan.step_records import Float32, Int64, LogitAdjustment, TokenCounts

Kind = Literal["bias", "allowed", "banned", "repetition", "output"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
Array = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]
# What eight tokens' bits of a mask add to their logits: many times faster than filling by condition.
_VALUES_OF_BITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)

RowPlan = dict[Kind, tuple[Int64, Float32]]  # token ids and one number for each; absent = not asked for


class Layout(NamedTuple):
    """What `adjust` does to A rows, as arrays to be sent to their device, and whose data is bad.

    Of each kind that any row asks for there are `<kind>_cells`, int64 indices into the flat [A * vocab], and
    `<kind>_values`, float32, one for each. `allowed_rows` are the rows that have such cells. The grammars'
    masks are `mask_rows` [M], `mask_words` [M, words], int32, and what a byte of these adds, `mask_values`.
    """

    arrays: dict[str, Array]
    errors: dict[int, str]  # by row a one-line reason; it is left as it is


def apply_adjustments(logits: torch.Tensor, adjustments: Sequence[LogitAdjustment]) -> dict[int, str]:
    """Change `logits` in place, row i by `adjustments[i]` (whose own `row` is not read).

    `logits` is contiguous float32 [A, vocab]. Returns a one-line reason for each index whose data is bad; its
    row is left as it was. Banned and not allowed is -inf, and stays so under bias and penalties.
    """
    layout = lay_out(adjustments, logits.shape[1])
    adjust(logits, {name: torch.from_numpy(array).to(logits.device) for name, array in layout.arrays.items()})
    return layout.errors


def lay_out(adjustments: Sequence[LogitAdjustment], vocab_size: int) -> Layout:
    """The layout of as many rows; masks are worked out here, which may take long."""
    plans: dict[int, RowPlan] = {}
    masks: dict[int, TokenMask] = {}
    errors: dict[int, str] = {}
    for index, adjustment in enumerate(adjustments):
        try:
            plan = _plan(adjustment, vocab_size)
            if adjustment.allowed_mask is not None:
                masks[index] = _mask(adjustment.allowed_mask, vocab_size)
            plans[index] = plan
        except Exception as error:  # whatever is wrong with one row's data must not reach the others
            errors[index] = f"bad logit adjustment: {error}"
    arrays: dict[str, Array] = {}
    for kind in _KINDS:
        arrays |= _cells(plans, kind, vocab_size)
    if "allowed_cells" in arrays:
        arrays["allowed_rows"] = np.array([i for i, plan in plans.items() if "allowed" in plan], np.int64)
    if masks:
        packed = np.stack(list(masks.values()))  # [M, ceil(vocab / 8)]
        arrays["mask_rows"] = np.array(list(masks), np.int64)
        arrays["mask_words"] = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.int32)
        arrays["mask_values"] = _VALUES_OF_BITS
    return Layout(arrays, errors)


def adjust(logits: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
    """Change `logits`, contiguous float32 [A, vocab], in place by a layout's arrays, which are beside them.

    On CUDA nothing here waits for the device: every shape is known.
    """
    flat = logits.view(-1)
    if "bias_cells" in arrays:
        flat.index_add_(0, arrays["bias_cells"], arrays["bias_values"])
    if "allowed_cells" in arrays:
        kept = flat.index_select(0, arrays["allowed_cells"])
        logits.index_fill_(0, arrays["allowed_rows"], -torch.inf)
        flat.index_copy_(0, arrays["allowed_cells"], kept)
    if "mask_rows" in arrays:
        _forbid(logits, arrays)
    if "banned_cells" in arrays:
        flat.index_fill_(0, arrays["banned_cells"], -torch.inf)
    if "repetition_cells" in arrays:
        penalty = arrays["repetition_values"]
        value = flat.index_select(0, arrays["repetition_cells"])
        value = torch.where(value > 0, value / penalty, value * penalty)
        flat.index_copy_(0, arrays["repetition_cells"], value)
    if "output_cells" in arrays:
        flat.index_add_(0, arrays["output_cells"], arrays["output_values"], alpha=-1)


def _forbid(logits: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
    """Set to -inf what the masks of some rows do not allow."""
    rows, places = arrays["mask_rows"], arrays["mask_words"].view(torch.uint8).int()  # [M], [M, bytes]
    forbidden = torch.nn.functional.embedding(places, arrays["mask_values"])  # [M, bytes, 8]
    forbidden = forbidden.flatten(1)[:, : logits.shape[1]]  # [M, vocab]
    if len(rows) == len(logits):
        logits += forbidden
    else:
        logits.index_add_(0, rows, forbidden)


def _cells(plans: Mapping[int, RowPlan], kind: Kind, vocab_size: int) -> dict[str, Array]:
    """The cells and values of one kind over all rows; none when no row asks."""
    asked = [(index, *plan[kind]) for index, plan in plans.items() if kind in plan]
    if not asked:
        return {}
    cells = np.concatenate([index * vocab_size + token_ids for index, token_ids, _ in asked])
    return {f"{kind}_cells": cells, f"{kind}_values": np.concatenate([values for *_, values in asked])}


def _plan(adjustment: LogitAdjustment, vocab_size: int) -> RowPlan:
    plan: RowPlan = {}
    if adjustment.logit_bias:
        token_ids, bias = zip(*adjustment.logit_bias, strict=True)
        plan["bias"] = _checked(token_ids, vocab_size), _finite(bias)
    if adjustment.allowed_token_ids is not None:
        plan["allowed"] = _with(_checked(adjustment.allowed_token_ids, vocab_size), 0.0)
    if adjustment.banned_token_ids:
        plan["banned"] = _with(_checked(adjustment.banned_token_ids, vocab_size), 0.0)
    if adjustment.history is not None:
        plan |= _penalties(adjustment, adjustment.history, vocab_size)
    return plan


def _penalties(adjustment: LogitAdjustment, history: TokenCounts, vocab_size: int) -> RowPlan:
    plan: RowPlan = {}
    seen = _checked(history.token_ids, vocab_size)
    if adjustment.repetition_penalty != 1.0:
        if adjustment.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, got {adjustment.repetition_penalty}")
        plan["repetition"] = _with(seen, adjustment.repetition_penalty)
    if adjustment.presence_penalty != 0.0 or adjustment.frequency_penalty != 0.0:
        said = history.in_output > 0
        penalty = adjustment.presence_penalty + adjustment.frequency_penalty * history.in_output[said]
        plan["output"] = seen[said], _finite(penalty)
    return plan


def _mask(source: MaskOf, vocab_size: int) -> TokenMask:
    mask = source.bits()
    if mask.shape != (-(-vocab_size // 8),):
        raise ValueError(f"a mask of {mask.size} bytes is not for {vocab_size} tokens")
    return mask


def _checked(token_ids: Sequence[int] | Int64, vocab_size: int) -> Int64:
    ids = np.asarray(token_ids, dtype=np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary [0, {vocab_size})")
    return ids


def _with(token_ids: Int64, value: float) -> tuple[Int64, Float32]:
    return token_ids, np.full(len(token_ids), _finite([value])[0], dtype=np.float32)


def _finite(values: Sequence[float] | NDArray[np.floating]) -> Float32:
    numbers = np.asarray(values, dtype=np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{numbers[~np.isfinite(numbers)][0]} is not a finite number")
    return numbers
