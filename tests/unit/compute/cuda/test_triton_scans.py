"""States of recurrent layers by Triton's kernels, in its interpreter, against torch; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.recurrent.pass_rows import PassRows
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.slot_states import LayerSlots
from engine.compute.recurrent.slot_step import Pieces, SlotStep
from engine.compute.recurrent.state_kernel import ConvInputs
from engine.compute.recurrent.state_memory import MemorySizes, StateMemory
from engine.compute.runner.dummy_steps import Part
from engine.plan.step_records import StepInputs
from tests.support.packed import random_tokens
from tests.support.recurrent import load_recurrent, pack_slots, with_drafts
from tests.support.scan_cases import ScanCase, ScanRun, delta_case, rows_of, selective_case, structured_case
from tests.support.tabled_scans import TabledScans

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda.state_scans import TritonScans  # noqa: E402
from tests.support.interpreter import with_all_numbers  # noqa: E402

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
TOKENS = [random_tokens(np.random.default_rng(seed), 30) for seed in range(3)]


def pieces_of(*spans: tuple[int, int, int]) -> StepInputs:
    """Of each seat the tokens from a first one up to a stop."""
    parts = {
        seat: Part(TOKENS[seat], first, stop, range(16 * seat, 16 * seat + 16)) for seat, first, stop in spans
    }
    return pack_slots(parts, every_row=True)


COURSE = [
    pieces_of((0, 0, 11), (2, 0, 5)),
    with_drafts(pieces_of((2, 5, 6), (0, 11, 15)), [0, 3]),
    pieces_of((0, 13, 14), (2, 6, 7), (1, 0, 3)),
    pieces_of((1, 3, 4), (0, 14, 15)),
]


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


# Of each sequence its slot, drafts accepted by now, new tokens, and those of them that are not taken in.
LAYOUTS: list[list[tuple[int, int, int, int]]] = [
    [(2, 0, 1, 0)],
    [(4, 0, 1, 0), (0, 0, 1, 0), (3, 0, 1, 0)],
    [(1, 2, 1, 0), (4, 0, 5, 3), (0, 3, 4, 3), (2, 0, 9, 0)],
    [(3, 0, 1, 1), (0, 1, 1, 1), (1, 0, 20, 1)],
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("taps", "has_bias", "activated"), [(4, True, True), (3, False, False), (2, True, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_and_what_is_kept_are_those_of_torch(
    layout: list[tuple[int, int, int, int]],
    taps: int,
    has_bias: bool,
    activated: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_all_numbers(monkeypatch)
    slots, again, new, outside = map(np.array, zip(*layout, strict=True))
    step = SlotStep(Pieces(slots, np.zeros(len(slots), bool), new, again, outside), 3, 6, torch.device("cpu"))
    noise = torch.Generator().manual_seed(taps)
    channels, others = 300, 7
    conv = torch.nn.Conv1d(channels, channels, taps, groups=channels, bias=has_bias, dtype=dtype)
    conv.requires_grad_(False)
    beside = torch.randn(int(new.sum()), channels + others + 3, generator=noise).to(dtype)
    found = []
    for kernel in (SCANS, None):
        kept = torch.randn(5, 6, channels + others, generator=torch.Generator().manual_seed(9)).to(dtype)
        own = LayerSlots(step, kept, torch.empty(5, 0), kernel)
        rows = PassRows(beside[:, : channels + others], own)
        convolved = rows.convolved(conv, activated=activated)
        rows.keep()
        found.append((*convolved, kept))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-5)
    assert torch.equal(found[0][2], found[1][2]) and torch.equal(found[0][1], found[1][1])


def test_a_convolution_leaves_rows_that_no_run_has_at_zero() -> None:
    pieces = Pieces(np.array([1, 0]), np.zeros(2, bool), np.array([1, 2]), np.array([0, 0]), np.zeros(2, int))
    step = SlotStep(pieces, 3, 4, torch.device("cpu"))
    runs, joins = (torch.nn.functional.pad(each, (0, 2), value=-1) for each in (step.runs, step.joins))
    kept, rows = torch.randn(3, 4, 20), torch.randn(6, 20)
    weight, before = torch.randn(16, 4), kept.clone()
    output = SCANS.convolve(ConvInputs(rows, kept, weight, None, 3, 6, True), runs, joins)
    assert output is not None and output[:3].any(1).all() and not output[3:].any()
    assert torch.equal(kept[2], before[2]) and torch.equal(kept[1, :2], before[1, 1:3])
    assert torch.equal(kept[1, 2], rows[0])


class ConvolutionsOnly(TritonScans):
    """What is between a convolution and a norm is left to the plain scans and torch's operations."""

    def gated_delta(self, inputs: Any, state: torch.Tensor, runs: torch.Tensor) -> None: ...

    def gated_structured(self, inputs: Any, state: torch.Tensor, runs: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *product(("qwen3_5_hybrid", "granite_hybrid", "mamba2"), (torch.float32, torch.bfloat16)),
        ("qwen3_next_hybrid", torch.float32),  # a rounding may send a row to another expert
    ],
)
def test_what_is_between_a_convolution_and_a_norm_is_computed_at_once(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole passes: prompts, drafts and what is behind them, with gates far to either side."""
    with_all_numbers(monkeypatch)
    loaded = load_recurrent(family, dtype)
    forward = RecurrentForward(loaded)
    found = []
    for kernel in (SCANS, ConvolutionsOnly(), None):
        forward.loaded = replace(loaded, state_kernel=kernel)
        memory = StateMemory(forward, MemorySizes(num_blocks=64, block_size=4, num_slots=3, max_drafts=4))
        found.append((torch.cat([forward(inputs, memory) for inputs in COURSE]), memory.states.tensors))
    (ours, our_states), (others, other_states), (theirs, _) = found
    scale = 1 if dtype is torch.float32 else 1000
    torch.testing.assert_close(ours, others, rtol=2e-5 * scale, atol=2e-5 * scale)
    torch.testing.assert_close(ours, theirs, rtol=2e-5 * scale, atol=2e-5 * scale)
    for mine, same in zip(our_states, other_states, strict=True):
        torch.testing.assert_close(mine, same, rtol=2e-5 * scale, atol=2e-5 * scale)


@pytest.mark.parametrize("case", TOO_LARGE.values(), ids=TOO_LARGE)
def test_sizes_that_it_does_not_compute_are_left_to_torch(case: ScanCase) -> None:
    chosen = case.of((3,), (1,))
    assert all(torch.equal(a, b) for a, b in zip(chosen.run(SCANS), chosen.run(None), strict=True))
