"""What a request does to its logits before temperature: bias, allowed and banned tokens, penalties.

Each row's data is checked and laid out on the host by itself, so that bad data ends that row only; then each
kind is applied to all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.plan.grammar import MaskOf, TokenMask
from engine.plan.step_records import Float32, Int64, LogitAdjustment, TokenCounts

Kind = Literal["bias", "allowed", "banned", "repetition", "output"]
# What eight tokens' bits of a mask add to their logits: many times faster than filling by condition.
_VALUES_OF_BITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)

RowPlan = dict[Kind, tuple[Int64, Float32]]  # token ids and one number for each; absent = not asked for


def apply_adjustments(logits: torch.Tensor, adjustments: Sequence[LogitAdjustment]) -> dict[int, str]:
    """Change `logits` in place, row i by `adjustments[i]` (whose own `row` is not read).

    `logits` is contiguous float32 [A, vocab]. Returns a one-line reason for each index whose data is bad; its
    row is left as it was. Banned and not allowed is -inf, and stays so under bias and penalties.
    """
    plans: dict[int, RowPlan] = {}
    masks: dict[int, TokenMask] = {}
    errors: dict[int, str] = {}
    for index, adjustment in enumerate(adjustments):
        try:
            plan = _plan(adjustment, logits.shape[1])
            if adjustment.allowed_mask is not None:
                masks[index] = _mask(adjustment.allowed_mask, logits.shape[1])
            plans[index] = plan
        except Exception as error:  # whatever is wrong with one row's data must not reach the others
            errors[index] = f"bad logit adjustment: {error}"
    flat = logits.view(-1)
    if (cells := _cells(plans, "bias", logits)) is not None:
        flat.index_put_((cells[0],), cells[1], accumulate=True)
    if (cells := _cells(plans, "allowed", logits)) is not None:
        rows = torch.tensor([i for i, plan in plans.items() if "allowed" in plan], device=logits.device)
        kept = flat[cells[0]]
        logits.index_fill_(0, rows, -torch.inf)
        flat[cells[0]] = kept
    _forbid(logits, masks)
    if (cells := _cells(plans, "banned", logits)) is not None:
        flat[cells[0]] = -torch.inf
    if (cells := _cells(plans, "repetition", logits)) is not None:
        value = flat[cells[0]]
        flat[cells[0]] = torch.where(value > 0, value / cells[1], value * cells[1])
    if (cells := _cells(plans, "output", logits)) is not None:
        flat[cells[0]] -= cells[1]
    return errors


def _forbid(logits: torch.Tensor, masks: Mapping[int, TokenMask]) -> None:
    """Set to -inf what the masks of some rows do not allow."""
    if not masks:
        return
    rows, packed = list(masks), np.stack(list(masks.values()))  # [rows, ceil(vocab / 8)]
    values = torch.from_numpy(_VALUES_OF_BITS).to(logits.device)
    places = torch.from_numpy(packed).to(logits.device).int()
    forbidden = torch.nn.functional.embedding(places, values).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits += forbidden
    else:
        logits.index_add_(0, torch.tensor(rows, device=logits.device), forbidden)


def _cells(
    plans: dict[int, RowPlan], kind: Kind, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Flat indices into `logits` and their numbers for one kind over all rows; None when no row asks."""
    asked = [(index, *plan[kind]) for index, plan in plans.items() if kind in plan]
    if not asked:
        return None
    places = np.concatenate([index * logits.shape[1] + token_ids for index, token_ids, _ in asked])
    numbers = np.concatenate([values for _, _, values in asked])
    return torch.from_numpy(places).to(logits.device), torch.from_numpy(numbers).to(logits.device)


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
