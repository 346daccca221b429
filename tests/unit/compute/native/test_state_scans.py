"""States of recurrent layers, advanced in one call: as by torch, and with the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from engine.compute.native.kernels import NativeKernels
from engine.compute.native.state_scans import NativeScans
from tests.support.scan_cases import ScanCase, ScanRun, delta_case, rows_of, selective_case, structured_case

pytestmark = pytest.mark.usefixtures("two_threads")

# Rows before the drafts, and drafts, of each sequence.
RUNS = [((1,), (0,)), ((1, 1, 1), (0, 0, 0)), ((5, 1, 70), (4, 0, 3)), ((200,), (0,)), ((2, 9), (1, 0))]
CASES = {
    "delta": delta_case(4, 4, 32, 64),
    "delta, shared keys": delta_case(6, 2, 128, 32),
    "delta, few keys": delta_case(2, 1, 20, 32),
    "delta by channel": delta_case(4, 2, 64, 64, by_channel=True),
    "structured": structured_case(4, 4, 64, 128),
    "structured, in groups": structured_case(6, 2, 20, 16),
    "selective": selective_case(96, 16),
    "selective, odd": selective_case(50, 32),
}
OTHER_SIZES = {
    "values": delta_case(2, 2, 32, 40),
    "keys": delta_case(2, 2, 30, 32),
    "many keys": delta_case(2, 2, 260, 32),
    "structured": structured_case(2, 1, 16, 24),
    "many structured": structured_case(2, 1, 16, 272),
    "selective": selective_case(32, 8),
}


@pytest.fixture(scope="module")
def scans(kernels: NativeKernels) -> NativeScans:
    return NativeScans(kernels)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_states_are_those_of_torch(
    scans: NativeScans, case: ScanCase, runs: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    chosen = case.of(*runs)
    expected, found = chosen.run(None), chosen.run(scans)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert torch.equal(found[1][-1], chosen.state[-1])  # nobody's slot


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_tokens_bits_are_its_own(scans: NativeScans, case: ScanCase) -> None:
    """A sequence in pieces, beside others or not, ends in the same state and says the same."""
    three = case.of((60, 3, 17), (0, 0, 0))
    whole, states = three.run(scans)
    alone = three.state[2:3].clone()  # slots lie the other way round
    found = []
    for first, stop in ((0, 1), (1, 2), (2, 35), (35, 60)):
        piece = case.of((stop - first,), (0,))
        run = ScanRun(case.scan, rows_of(three.inputs, first, stop), alone, piece.step)
        rows, alone = run.run(scans)
        found.append(rows)
    assert torch.equal(torch.cat(found), whole[:60])
    assert torch.equal(alone[0], states[2])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_drafts_are_mixed_and_not_taken_in(scans: NativeScans, case: ScanCase) -> None:
    without, with_drafts = case.of((9,), (0,)).run(scans), case.of((9,), (4,)).run(scans)
    assert torch.equal(without[1], with_drafts[1])
    assert torch.equal(without[0], with_drafts[0][:9])
    assert len(with_drafts[0]) == 13


@pytest.mark.parametrize("case", OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_sizes_that_it_does_not_compute_are_left_to_torch(scans: NativeScans, case: ScanCase) -> None:
    chosen = case.of((3,), (1,))
    assert all(torch.equal(a, b) for a, b in zip(chosen.run(scans), chosen.run(None), strict=True))


def test_slots_may_lie_apart(scans: NativeScans) -> None:
    """As those of one of Zamba's heads do."""
    chosen = selective_case(96, 16).of((5, 1, 70), (4, 0, 3))
    expected, states = chosen.run(scans)
    heads = torch.stack((chosen.state, chosen.state), dim=1)
    found = scans.selective(chosen.inputs, heads[:, 1], chosen.step.runs)
    assert found is not None and torch.equal(found, expected)
    assert torch.equal(heads[:, 1], states) and torch.equal(heads[:, 0], chosen.state)
