"""RWKV's means and shifts against sums written out, also where exponents are far beyond a float's range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import Pieces, SlotStep
from engine.compute.recurrent.wkv import previous_scan, wkv_scan

CPU = torch.device("cpu")


def one_slot(num_tokens: int, state: torch.Tensor, num_drafts: int = 0) -> LayerSlots:
    """A pass of one sequence that begins, in the only slot."""
    one = [np.array([value]) for value in (0, num_tokens, 0, num_drafts)]
    pieces = Pieces(one[0].astype(np.intp), np.array([True]), *one[1:])
    return LayerSlots(SlotStep(pieces, 0, num_drafts, CPU), torch.zeros(1, num_drafts, 0), state)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_means_are_those_of_the_written_out_sums(scale: float) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(70, 5) * scale, torch.randn(70, 5)
    decay, first = -torch.rand(5), torch.randn(5)
    mixed = wkv_scan(keys, values, decay, first, one_slot(70, torch.zeros(1, 3, 5)))
    for place in range(70):
        ages = torch.arange(place - 1, -1, -1, dtype=torch.float64)
        exponents = torch.cat((keys[:place] + decay * ages[:, None], (keys[place] + first)[None]))
        expected = (exponents.softmax(0) * values[: place + 1]).sum(0)
        torch.testing.assert_close(mixed[place].double(), expected, atol=1e-4, rtol=1e-4)


def test_drafts_are_kept_out_of_the_states() -> None:
    torch.manual_seed(0)
    keys, values, rows = torch.randn(9, 5), torch.randn(9, 5), torch.randn(9, 4)
    decay, first = -torch.rand(5), torch.randn(5)
    with_drafts, without = torch.zeros(1, 3, 5), torch.zeros(1, 3, 5)
    wkv_scan(keys, values, decay, first, one_slot(9, with_drafts, num_drafts=3))
    wkv_scan(keys[:6], values[:6], decay, first, one_slot(6, without))
    torch.testing.assert_close(with_drafts, without)
    row = torch.zeros(1, 4)
    before = previous_scan(rows, one_slot(9, row, num_drafts=3))
    assert torch.equal(before, torch.cat((torch.zeros(1, 4), rows[:-1])))
    assert torch.equal(row[0], rows[5])
