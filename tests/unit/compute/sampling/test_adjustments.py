"""Bias, allowed and banned tokens, penalties: exact values, and bad data that ends its own row only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.compute.sampling.adjustments import apply_adjustments
from engine.plan.grammar import MaskOf, TokenMask
from engine.plan.step_records import LogitAdjustment
from tests.support.sampling_reference import counted

INF = math.inf
LOGITS = (2.0, -2.0, 0.0, 4.0)


def apply(**fields: object) -> list[float]:
    """The one row after an adjustment that must be good."""
    logits = torch.tensor([LOGITS])
    assert apply_adjustments(logits, [LogitAdjustment(row=0, **fields)]) == {}  # type: ignore[arg-type]
    return logits[0].tolist()


def test_bias_is_added_and_repeated_entries_add_up() -> None:
    assert apply(logit_bias=((0, 1.5), (3, -100.0), (0, 0.5))) == [4.0, -2.0, 0.0, -96.0]


def test_allowed_and_banned_leave_the_rest_as_it_is() -> None:
    assert apply(allowed_token_ids=(3, 1, 3)) == [-INF, -2.0, -INF, 4.0]
    assert apply(banned_token_ids=(0, 0, 2)) == [-INF, -2.0, -INF, 4.0]
    assert apply(allowed_token_ids=(1, 2), banned_token_ids=(2,)) == [-INF, -2.0, -INF, -INF]
    assert apply(allowed_token_ids=()) == [-INF] * 4


def test_bias_does_not_bring_a_banned_token_back() -> None:
    assert apply(logit_bias=((0, 100.0),), banned_token_ids=(0,))[0] == -INF
    assert apply(logit_bias=((0, 100.0),), allowed_token_ids=(1,))[0] == -INF


def test_repetition_divides_positive_and_multiplies_negative_once_a_token() -> None:
    history = counted((0, 0, 1), (1, 2, 0))
    assert apply(repetition_penalty=2.0, history=history) == [1.0, -4.0, 0.0, 4.0]
    assert apply(repetition_penalty=0.5, history=history) == [4.0, -1.0, 0.0, 4.0]


def test_presence_and_frequency_see_the_output_only() -> None:
    history = counted((3, 3), (0, 1, 0))
    assert apply(presence_penalty=0.5, history=history) == [1.5, -2.5, 0.0, 4.0]
    assert apply(frequency_penalty=0.25, history=history) == [1.5, -2.25, 0.0, 4.0]
    assert apply(presence_penalty=-1.0, frequency_penalty=-0.5, history=history) == [4.0, -0.5, 0.0, 4.0]


def test_bias_comes_before_penalties_and_repetition_before_presence() -> None:
    found = apply(
        logit_bias=((1, 6.0),), repetition_penalty=2.0, presence_penalty=1.0, history=counted(output=(1,))
    )
    assert found == [2.0, (-2.0 + 6.0) / 2 - 1, 0.0, 4.0]


def test_a_banned_token_stays_banned_under_penalties() -> None:
    penalties = {"repetition_penalty": 1.5, "presence_penalty": -2.0, "history": counted(output=(0,))}
    assert apply(banned_token_ids=(0,), **penalties)[0] == -INF


def test_rows_are_adjusted_apart() -> None:
    logits = torch.tensor([LOGITS] * 3)
    adjustments = [
        LogitAdjustment(row=9, presence_penalty=1.0, history=counted(output=(0,))),
        LogitAdjustment(row=4, allowed_token_ids=(1,)),
        LogitAdjustment(row=7, presence_penalty=2.0, history=counted(output=(0, 3)), banned_token_ids=(1,)),
    ]
    assert apply_adjustments(logits, adjustments) == {}
    assert logits.tolist() == [[1.0, -2.0, 0.0, 4.0], [-INF, -2.0, -INF, -INF], [0.0, -INF, 0.0, 2.0]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": ((4, 1.0),)}, "token id 4 is outside the vocabulary [0, 4)"),
        ({"banned_token_ids": (-1,)}, "token id -1 is outside the vocabulary [0, 4)"),
        ({"allowed_token_ids": (0, 99)}, "token id 99 is outside the vocabulary [0, 4)"),
        ({"presence_penalty": 1.0, "history": counted(output=(4,))}, "token id 4 is outside"),
        ({"repetition_penalty": 2.0, "history": counted((4,))}, "token id 4 is outside"),
        ({"logit_bias": ((1, math.nan),)}, "nan is not a finite number"),
        ({"presence_penalty": math.inf, "history": counted(output=(0,))}, "inf is not a finite number"),
        (
            {"repetition_penalty": 0.0, "history": counted(output=(0,))},
            "repetition_penalty must be above 0, got 0.0",
        ),
        ({"repetition_penalty": math.inf, "history": counted(output=(0,))}, "inf is not a finite number"),
        ({"logit_bias": (("x", 1.0),)}, "invalid literal"),
        ({"banned_token_ids": (2**70,)}, "too large"),
    ],
)
def test_bad_data_ends_its_own_row_only(fields: dict[str, object], reason: str) -> None:
    logits = torch.tensor([LOGITS] * 3)
    good = LogitAdjustment(row=0, banned_token_ids=(0,))
    errors = apply_adjustments(logits, [good, LogitAdjustment(row=1, **fields), good])  # type: ignore[arg-type]
    assert list(errors) == [1]
    assert reason in errors[1]
    assert "\n" not in errors[1]
    assert logits[1].tolist() == list(LOGITS)
    assert logits[0].tolist() == logits[2].tolist() == [-INF, -2.0, 0.0, 4.0]


class OneMask:
    """A grammar that allows the same everywhere, or has no time left."""

    is_dear = False

    def __init__(self, bits: TokenMask | None) -> None:
        self.bits = bits

    def mask(self, path: Sequence[int]) -> TokenMask:
        if self.bits is None:
            raise ValueError("it takes too long")
        return self.bits

    def num_valid(self, token_ids: Sequence[int]) -> int:
        raise NotImplementedError

    def foresee(self, token_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def accept(self, token_id: int) -> bool:
        raise NotImplementedError


def packed(*token_ids: int, vocab_size: int = 4) -> MaskOf:
    bits = np.zeros(vocab_size, np.uint8)
    bits[list(token_ids)] = 1
    return MaskOf(OneMask(np.packbits(bits, bitorder="little")))


def test_a_mask_leaves_what_it_allows_and_everything_else_still_counts() -> None:
    assert apply(allowed_mask=packed(0, 2)) == [2.0, -INF, 0.0, -INF]
    assert apply(allowed_mask=packed(0, 2), banned_token_ids=(2,)) == [2.0, -INF, -INF, -INF]
    assert apply(allowed_mask=packed(0, 2), allowed_token_ids=(2, 3)) == [-INF, -INF, 0.0, -INF]
    assert apply(allowed_mask=packed(0, 2), logit_bias=((2, 5.0), (3, 100.0))) == [2.0, -INF, 5.0, -INF]
    assert apply(allowed_mask=packed(1, 3), repetition_penalty=2.0, history=counted(output=(0, 1))) == [
        *(-INF, -4.0, -INF, 4.0)
    ]
    assert apply(allowed_mask=packed()) == [-INF] * 4


def test_masks_change_their_own_rows_only() -> None:
    vocab_size = 77
    logits = torch.randn(5, vocab_size)
    wanted = logits.clone()
    wanted[1, 1:] = -INF
    wanted[3, :76] = -INF
    masks = {1: packed(0, vocab_size=vocab_size), 3: packed(76, vocab_size=vocab_size)}
    adjustments = [LogitAdjustment(row=i, allowed_mask=masks.get(i)) for i in range(5)]
    assert apply_adjustments(logits, adjustments) == {}
    torch.testing.assert_close(logits, wanted)


def test_a_mask_for_another_vocabulary_is_its_rows_own_error() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    adjustments = [
        LogitAdjustment(row=0, allowed_mask=packed(0, vocab_size=9)),
        LogitAdjustment(row=1, allowed_mask=packed(0)),
    ]
    assert apply_adjustments(logits, adjustments) == {
        0: "bad logit adjustment: a mask of 2 bytes is not for 4 tokens"
    }
    assert logits.tolist() == [list(LOGITS), [2.0, -INF, -INF, -INF]]


def test_a_mask_that_cannot_be_had_is_its_rows_own_error() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    adjustments = [
        LogitAdjustment(row=0, allowed_mask=MaskOf(OneMask(None))),
        LogitAdjustment(row=1, allowed_mask=packed(0)),
    ]
    assert apply_adjustments(logits, adjustments) == {0: "bad logit adjustment: it takes too long"}
    assert logits.tolist() == [list(LOGITS), [2.0, -INF, -INF, -INF]]
