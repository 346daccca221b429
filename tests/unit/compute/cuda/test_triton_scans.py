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
from tests.support.recurrent_classes import loaded_from, model_of
from tests.support.scan_cases import (
    ScanCase,
    ScanRun,
    as_served,
    by_channel_of,
    delta_case,
    gated_delta_of,
    gated_structured_of,
    lightning_of,
    rows_of,
    runs_of,
    selective_case,
    structured_case,
)
from tests.support.tabled_scans import TabledScans

triton = pytest.importorskip("triton")
tl = triton.language
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import state_scans  # noqa: E402
from engine.compute.cuda.fused_model import with_scans  # noqa: E402
from engine.compute.cuda.state_kernels import _softplus  # noqa: E402
from engine.compute.cuda.state_scans import CHUNK, TritonScans, may_have_chunks  # noqa: E402
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
SCANS = TritonScans(in_chunks=(torch.float32, torch.bfloat16, torch.float16))
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
    pieces_of((0, 13, 14), (2, 6, 7), (1, 0, 21)),
    pieces_of((1, 21, 22), (0, 14, 15)),
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


# Of each sequence its slot, how many rows it has, and how many are taken in.
PROMPTS = {
    "one": [(0, 40, 40)],
    "a chunk and less": [(2, 16, 16), (0, 1, 1), (3, 15, 15), (1, 18, 15)],
    "drafts behind chunks": [(1, 35, 33), (3, 16, 15), (0, 40, 32)],
    "more than at once": [(slot, 17 + slot % 3, 17) for slot in range(11)],
}
DELTA_SIZES = [(4, 2, 32, 64), (3, 3, 20, 40), (2, 1, 8, 8)]  # heads, heads of keys, keys, values
STRUCTURED_SIZES = [(4, 1, 64, 128), (6, 3, 20, 24), (2, 2, 8, 8)]  # heads, groups, dim, size


LAYERS = {
    **{f"by channel {sizes}": ("delta", by_channel_of, sizes) for sizes in DELTA_SIZES},
    **{f"lightning {sizes}": ("structured", lightning_of, sizes) for sizes in STRUCTURED_SIZES},
    **{f"delta {sizes}": ("gated_delta", gated_delta_of, sizes) for sizes in DELTA_SIZES},
    **{f"structured {sizes}": ("gated_structured", gated_structured_of, sizes) for sizes in STRUCTURED_SIZES},
}


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **sizes: None


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_prompts_in_chunks_are_what_they_are_token_by_token(
    layer: Any, prompts: list[tuple[int, int, int]]
) -> None:
    name, make, sizes = layer
    runs = runs_of(prompts)
    inputs, shape = make(sizes, int(runs[2, :-1].sum()) + 2)
    found = []
    for scans in (SCANS, TritonScans(in_chunks=())):
        state = torch.randn(len(prompts) + 4, *shape, generator=torch.Generator().manual_seed(1))
        found.append((getattr(scans, name)(inputs, state, runs), state))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not found[0][0][-2:].any(), "rows of no sequence"


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_so_they_are_of_models_in_half_numbers(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)
    name, make, sizes = layer
    given, shape = make(sizes, 60)
    inputs, found = as_served(given, torch.device("cpu"), torch.bfloat16), []
    for scans in (TritonScans(), TritonScans(in_chunks=())):
        state = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
        output = getattr(scans, name)(inputs, state, runs_of([(2, 40, 33), (0, 20, 20)]))
        found.append((output.float(), state))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert not torch.equal(found[0][1], found[1][1]), "chunks are rounded otherwise"


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_tokens_of_whole_chunks_are_not_taken_in_one_by_one(
    layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make, sizes = layer
    monkeypatch.setattr(state_scans, f"{name}_kernel", Nothing())
    runs = runs_of([(0, 1, 1), (1, 37, 35)])
    inputs, shape = make(sizes, 38)
    output = getattr(SCANS, name)(inputs, torch.randn(3, *shape), runs)
    assert output[1:33].flatten(1).any(1).all() and not output[0].any() and not output[33:].any()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_beside_prompts_a_token_alone_has_the_bits_that_it_has_without(layer: Any) -> None:
    name, make, sizes = layer
    inputs, shape = make(sizes, 60)
    states = torch.randn(3, *shape), torch.randn(3, *shape)
    states[1][:] = states[0]
    advance = getattr(SCANS, name)
    beside = advance(inputs, states[0], runs_of([(1, 1, 1), (0, 59, 59)]))
    one = rows_of(inputs, 0, 1) if "rows" not in inputs._fields else inputs._replace(rows=inputs.rows[:1])
    alone = advance(one, states[1], runs_of([(1, 1, 1)]))
    assert torch.equal(beside[:1], alone) and torch.equal(states[0][1], states[1][1])


def test_chunks_are_looked_for_where_a_sequence_may_have_one() -> None:
    assert not any(may_have_chunks(count, count) for count in range(1, 300))
    assert may_have_chunks(CHUNK, 1) and may_have_chunks(CHUNK + 9, 10)
    assert not may_have_chunks(CHUNK + 8, 10)


@pytest.mark.parametrize("kernel", ["gated_delta_chunks_kernel", ""])
def test_prompts_are_taken_in_by_chunks_where_logits_stay(
    kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of half numbers; if only the chunks go wrong, tokens are taken in one by one."""
    with_all_numbers(monkeypatch)
    if kernel:
        monkeypatch.setattr(state_scans, kernel, Nothing())
    found = with_scans(load_recurrent("qwen3_5_hybrid", torch.bfloat16), 4).state_kernel
    assert isinstance(found, TritonScans)
    assert found.in_chunks == (() if kernel else (torch.bfloat16, torch.float16))
    assert ("token by token" in caplog.text) is bool(kernel)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("KimiLinear", "delta_chunks_kernel"),
        ("BailingHybrid", "delta_chunks_kernel"),
        ("MiniMax", "structured_chunks_kernel"),
    ],
)
def test_models_whose_gates_are_torch_s_take_prompts_in_by_chunks(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_chunks, calls = getattr(state_scans, kernel), []

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            calls.append(grid)
            return by_chunks[grid]

    monkeypatch.setattr(state_scans, kernel, Counted())
    loaded = loaded_from(model_of(name))
    forward = RecurrentForward(loaded)
    parts = {seat: Part(TOKENS[seat], 0, 20 + seat, range(16 * seat, 16 * seat + 16)) for seat in range(3)}
    course = (pack_slots(parts, every_row=True), pieces_of((1, 21, 22), (0, 20, 25)))
    found = []
    for scans in (SCANS, TritonScans(in_chunks=()), None):
        forward.loaded = replace(loaded, state_kernel=scans)
        memory = StateMemory(forward, MemorySizes(num_blocks=64, block_size=4, num_slots=3, max_drafts=4))
        found.append(torch.cat([forward(inputs, memory) for inputs in course]))
        assert calls
    for others in found[1:]:
        torch.testing.assert_close(found[0], others, rtol=1e-4, atol=1e-4)
    assert len(calls) == sum(kind.shape is not None for kind in loaded.states)


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
    # Logits are up to 13; where torch rounds its convolution otherwise, that alone makes 3.6e-5 of it.
    torch.testing.assert_close(ours, theirs, rtol=2e-5 * scale, atol=5e-5 * scale)
    for mine, same in zip(our_states, other_states, strict=True):
        torch.testing.assert_close(mine, same, rtol=2e-5 * scale, atol=2e-5 * scale)


@pytest.mark.parametrize("case", TOO_LARGE.values(), ids=TOO_LARGE)
def test_sizes_that_it_does_not_compute_are_left_to_torch(case: ScanCase) -> None:
    chosen = case.of((3,), (1,))
    assert all(torch.equal(a, b) for a, b in zip(chosen.run(SCANS), chosen.run(None), strict=True))


@triton.jit  # type: ignore[untyped-decorator]
def softplus_kernel(given: Any, made: Any) -> None:
    places = tl.arange(0, 512)
    tl.store(made + places, _softplus(tl.load(given + places)))


def test_a_step_that_is_nearly_nothing_keeps_its_digits() -> None:
    """1 + exp(-10) in float32 has lost three of them."""
    numbers = torch.linspace(-60.0, 40.0, 512)
    found = torch.empty_like(numbers)
    softplus_kernel[(1,)](numbers, found)
    expected = torch.nn.functional.softplus(numbers.double())
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0.0)
