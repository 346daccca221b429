"""States of recurrent layers by Triton's kernels, in its interpreter, against torch; `make test-triton`."""

from __future__ import annotations

import pytest
import torch

from tests.support.scan_cases import ScanCase, ScanRun, delta_case, rows_of, selective_case, structured_case
from tests.support.tabled_scans import TabledScans

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.state_scans import TritonScans  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # Triton 3.6, numpy 2.3
]

# Rows before the drafts, and drafts, of each sequence.
RUNS = [((1,), (0,)), ((1, 1, 1), (0, 0, 0)), ((5, 1, 20), (4, 0, 3)), ((0, 9), (1, 0))]
CASES = {
    "delta": delta_case(4, 4, 32, 64),
    "delta, shared keys": delta_case(6, 2, 128, 40),
    "delta, few keys": delta_case(2, 1, 20, 32),
    "delta by channel": delta_case(4, 2, 64, 64, by_channel=True),
    "structured": structured_case(4, 4, 64, 128),
    "structured, in groups": structured_case(6, 2, 20, 24),
    "selective": selective_case(96, 16),
    "selective, odd": selective_case(50, 12),
}
TOO_LARGE = {
    "keys": delta_case(2, 2, 260, 32),
    "structured": structured_case(2, 1, 16, 272),
    "selective": selective_case(8, 272),
}
SCANS = TritonScans()


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_states_are_those_of_torch(
    case: ScanCase, runs: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    chosen = case.of(*runs)
    found = chosen.run(SCANS)
    for other in (TabledScans(), None):
        for ours, theirs in zip(found, chosen.run(other), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert torch.equal(found[1][-1], chosen.state[-1])  # nobody's slot


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_tokens_bits_are_its_own(case: ScanCase) -> None:
    """A sequence in pieces, beside others or not, ends in the same state and says the same."""
    three = case.of((12, 3, 7), (0, 0, 0))
    whole, states = three.run(SCANS)
    alone = three.state[2:3].clone()  # slots lie the other way round
    found = []
    for first, stop in ((0, 1), (1, 2), (2, 9), (9, 12)):
        piece = case.of((stop - first,), (0,))
        run = ScanRun(case.scan, rows_of(three.inputs, first, stop), alone, piece.step)
        rows, alone = run.run(SCANS)
        found.append(rows)
    assert torch.equal(torch.cat(found), whole[:12])
    assert torch.equal(alone[0], states[2])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_that_no_run_has_are_zeros_and_touch_no_state(case: ScanCase) -> None:
    chosen = case.of((2, 3), (0, 0))
    runs = chosen.step.runs.clone()
    runs[0, 1] = -1
    chosen.step.__dict__["runs"] = runs
    output, state = chosen.run(SCANS)
    assert output[:2].any() and not output[2:].any()
    assert torch.equal(state[0], chosen.state[0]) and not torch.equal(state[1], chosen.state[1])


@pytest.mark.parametrize("case", TOO_LARGE.values(), ids=TOO_LARGE)
def test_sizes_that_it_does_not_compute_are_left_to_torch(case: ScanCase) -> None:
    chosen = case.of((3,), (1,))
    assert all(torch.equal(a, b) for a, b in zip(chosen.run(SCANS), chosen.run(None), strict=True))
