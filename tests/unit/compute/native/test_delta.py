"""States by the delta rule in one call: as torch computes them, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from engine.compute.native.kernels import NativeKernels
from engine.compute.recurrent.delta_kernel import DeltaInputs
from tests.support.delta_cases import DeltaCase

pytestmark = pytest.mark.usefixtures("two_threads")

# Rows before the drafts, and drafts, of each sequence.
RUNS = [((1,), (0,)), ((1, 1, 1), (0, 0, 0)), ((5, 1, 70), (4, 0, 3)), ((200,), (0,)), ((2, 9), (1, 0))]


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("heads", [(4, 4, 32, 64), (6, 2, 128, 32), (2, 1, 20, 32)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_outputs_and_states_are_those_of_torch(
    kernels: NativeKernels,
    runs: tuple[tuple[int, ...], tuple[int, ...]],
    heads: tuple[int, int, int, int],
    by_channel: bool,
) -> None:
    case = DeltaCase(*runs, *heads, by_channel=by_channel)
    expected, found = case.run(None), case.run(kernels)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1][-1], case.state[-1])  # nobody's slot


def test_a_tokens_bits_are_its_own(kernels: NativeKernels) -> None:
    """A sequence in pieces, beside others or not, ends in the same state and says the same."""
    case = DeltaCase((60, 3, 17), (0, 0, 0), 4, 2, 64, 64)
    whole, state = case.run(kernels)
    alone = case.state.clone()
    found = []
    for first, stop in ((0, 1), (1, 2), (2, 35), (35, 60)):
        rows = DeltaInputs(*(each[first:stop] for each in case.inputs))
        runs = torch.tensor([[2], [0], [stop - first], [stop - first]])
        found.append(kernels.scan_delta(rows, alone, runs))
    assert torch.equal(torch.cat([rows for rows in found if rows is not None]), whole[:60])
    assert torch.equal(alone[2], state[2])  # slots lie the other way round


def test_drafts_are_mixed_and_not_taken_in(kernels: NativeKernels) -> None:
    taken, drafts = DeltaCase((9,), (0,), 2, 2, 32, 32), DeltaCase((9,), (4,), 2, 2, 32, 32)
    rows = slice(0, 9)
    assert all(torch.equal(a[rows], b[rows]) for a, b in zip(taken.inputs, drafts.inputs, strict=True))
    before, after = taken.run(kernels), drafts.run(kernels)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0], after[0][rows])
    assert len(after[0]) == 13


@pytest.mark.parametrize("heads", [(2, 2, 32, 40), (2, 2, 30, 32), (2, 2, 260, 32)])
def test_sizes_that_it_does_not_compute_are_left_to_torch(
    kernels: NativeKernels, heads: tuple[int, int, int, int]
) -> None:
    case = DeltaCase((3,), (1,), *heads)
    assert kernels.scan_delta(case.inputs, case.state, case.step.runs) is None
    assert all(torch.equal(a, b) for a, b in zip(case.run(kernels), case.run(None), strict=True))
