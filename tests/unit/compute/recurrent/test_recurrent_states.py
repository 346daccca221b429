"""Slots hold what a sequence has seen and nothing else, and the scans are the recurrences they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from engine.compute.recurrent.delta_rule import delta_scan
from engine.compute.recurrent.slot_states import LayerSlots, LayerState, SlotStates, state_bytes
from engine.compute.recurrent.slot_step import Pieces, SlotStep
from engine.compute.recurrent.state_kernel import DeltaInputs, SelectiveInputs, StructuredInputs
from engine.compute.recurrent.state_space import (
    convolve,
    diagonal_scan,
    selective_scan,
    structured_scan,
)
from engine.compute.runner.dummy_steps import Part
from engine.errors import RewindError, RewindFault
from engine.plan.step_records import StepInputs
from tests.support.recurrent import pack_slots, with_drafts

CPU = torch.device("cpu")
STATES = (LayerState(0, 6, 3, (4, 2)), LayerState(2, 10, 3, (2, 3, 5)))
MAX_DRAFTS = 6


def step_of(*pieces: tuple[int, ...]) -> StepInputs:
    """A step of (slot, first, stop) and perhaps the number of drafts among them, in packed order."""
    parts = {piece[0]: Part([5] * piece[2], piece[1], piece[2], range(99)) for piece in pieces}
    return with_drafts(pack_slots(parts), [sum(piece[3:]) for piece in pieces])


def make_states(num_slots: int = 6) -> SlotStates:
    return SlotStates(STATES, num_slots, torch.bfloat16, CPU, MAX_DRAFTS)


# --- sizes ---


def test_slots_cost_what_they_are_said_to() -> None:
    states = make_states(num_slots=7)
    tensors = [rows[:7] for rows in states.rows.values()]  # behind them are those of nobody's slot
    tensors += states.state.values()
    assert {len(rows) for rows in states.rows.values()} == {8}
    assert sum(tensor.nbytes for tensor in tensors) == state_bytes(STATES, torch.bfloat16, 7, MAX_DRAFTS)
    assert state_bytes(STATES, torch.bfloat16) == (6 + 10) * 3 * 2 + (4 * 2 + 2 * 3 * 5) * 4
    assert state_bytes((), torch.float32, 100) == 0
    assert {tensor.dtype for tensor in states.state.values()} == {torch.float32}


# --- which slots a pass continues ---


def test_single_tokens_are_put_in_order_of_their_slots() -> None:
    step = make_states().begin(step_of((3, 0, 1), (1, 0, 1), (2, 0, 1), (5, 0, 4), (0, 0, 2)))
    singles, short = step.blocks(64)
    assert singles.shape == (3, 1) and singles.slots == slice(1, 4)  # in one run: changed in place
    assert isinstance(singles.rows, torch.Tensor) and singles.rows.tolist() == [1, 2, 0]
    assert isinstance(short.slots, torch.Tensor) and short.slots.tolist() == [0, 5]
    assert isinstance(short.rows, torch.Tensor) and short.rows.tolist() == [7, 8, 8, 8, 3, 4, 5, 6]
    assert short.valid is not None and short.valid.sum(1).tolist() == [2, 4]


def test_long_runs_end_together_and_drafts_lie_in_their_last_block() -> None:
    states = make_states()
    step = states.begin(step_of((0, 0, 150), (1, 0, 70, 6)))
    shapes = [block.shape for block in step.blocks(64)]
    assert shapes == [(1, 22), (2, 64), (2, 64)]
    assert step.blocks(64)[1].taken is not None and step.blocks(64)[1].valid is not None
    taken = step.blocks(64)[2].taken
    assert taken is not None and taken.sum(1).tolist() == [64, 58]


def test_a_sequence_that_begins_finds_zeros_and_its_neighbours_keep_theirs() -> None:
    states = make_states()
    states.begin(step_of((1, 0, 1), (2, 0, 3)))
    states.commit_states(step_of((1, 0, 1), (2, 0, 3)))
    tensors = [*states.rows.values(), *states.state.values()]
    for tensor in tensors:
        tensor.fill_(torch.nan)
    states.begin(step_of((1, 0, 1), (2, 3, 4)))
    for tensor in tensors:
        assert not tensor[1].any()
        assert tensor[[0, 2, 3, 4, 5]].isnan().all()


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (3, RewindFault.NOT_SUPPORTED),
        (8, RewindFault.POSITION_BEYOND_END),
    ],
)
def test_a_state_goes_on_where_it_ended_or_at_a_draft_and_nowhere_else(
    first: int, fault: RewindFault
) -> None:
    states = make_states()
    step = step_of((2, 0, 7, 3))
    states.begin(step)
    states.commit_states(step)
    with pytest.raises(RewindError, match=rf"slot 2 has seen 4 tokens.* position {first}") as refused:
        states.begin(step_of((0, 0, 1), (2, first, first + 1)))
    assert refused.value.fault is fault
    states.begin(step_of((2, 6, 8)))  # nothing has changed, and two of the three drafts were accepted


def test_an_empty_slot_cannot_be_continued() -> None:
    with pytest.raises(RewindError, match="slot 1 has seen 0 tokens") as refused:
        make_states().begin(step_of((1, 7, 8)))
    assert refused.value.fault is RewindFault.POSITION_BEYOND_END


def test_a_pass_that_failed_leaves_its_slots_empty_and_no_other() -> None:
    states = make_states()
    both = step_of((0, 0, 3), (1, 0, 3))
    states.begin(both)
    states.commit_states(both)
    states.begin(step_of((0, 3, 4)))  # and never commits
    with pytest.raises(RewindError, match="slot 0 has seen 0 tokens"):
        states.begin(step_of((0, 3, 4)))
    states.begin(step_of((1, 3, 4)))
    states.begin(step_of((0, 0, 4)))


def test_trees_and_more_drafts_than_are_kept_are_refused() -> None:
    inputs = step_of((0, 0, 8, 3))
    assert inputs.drafts is not None
    tree = replace(inputs.drafts, parents=np.array([-1, 0, 0], np.int32))
    for refused, match in (
        (replace(inputs, drafts=tree), "no trees"),
        (step_of((0, 0, 8, 7)), "of 6 drafts"),
    ):
        with pytest.raises(RewindError, match=match) as error:
            make_states().begin(refused)
        assert error.value.fault is RewindFault.NOT_SUPPORTED


# --- the recurrences, against one token at a time in double precision ---

# (slot, accepted drafts, tokens, drafts among them) in packed order: singles apart and together, runs shorter
# and longer than a block, with drafts mixed again and drafts that the state must not take in.
LAYOUTS = [
    [(0, 0, 1, 0), (1, 0, 1, 0), (2, 0, 1, 0)],
    [(4, 0, 1, 0), (0, 0, 1, 0), (2, 0, 5, 0)],
    [(3, 0, 2, 0), (1, 0, 64, 0)],
    [(5, 0, 1, 0), (0, 0, 65, 0), (4, 0, 150, 0)],
    [(1, 0, 4, 3), (2, 2, 1, 0), (0, 6, 5, 4)],
    [(0, 0, 70, 6), (3, 3, 30, 2), (2, 1, 17, 1)],
]
Layout = list[tuple[int, int, int, int]]


def slots_for(layout: Layout, state: torch.Tensor, rows: torch.Tensor | None = None) -> LayerSlots:
    slots, again, new, drafts = np.array(layout, np.int64).T
    pieces = Pieces(slots.astype(np.intp), np.zeros(len(slots), np.bool_), new, again, drafts)
    step = SlotStep(pieces, 3, 3 + MAX_DRAFTS, CPU)
    return LayerSlots(step, torch.zeros(6, 9, 1) if rows is None else rows.clone(), state.clone())


def num_mixed(layout: Layout) -> int:
    return sum(again + new for _, again, new, _ in layout)


def rows_of(layout: Layout) -> list[tuple[int, range, int]]:
    """(slot, mixed rows, how many of them the state takes in)."""
    ends = np.cumsum([again + new for _, again, new, _ in layout]).tolist()
    return [
        (slot, range(end - again - new, end), again + new - drafts)
        for (slot, again, new, drafts), end in zip(layout, ends, strict=True)
    ]


def assert_untouched(layout: Layout, now: torch.Tensor, before: torch.Tensor) -> None:
    untouched = [slot for slot in range(6) if slot not in {piece[0] for piece in layout}]
    assert torch.equal(now[untouched], before[untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_goes_on_from_the_inputs_before(layout: Layout, bias: bool) -> None:
    torch.manual_seed(0)
    channels = 10
    conv = nn.Conv1d(channels, channels, 4, groups=channels, padding=3, bias=bias).requires_grad_(False)
    before = torch.randn(6, 3 + MAX_DRAFTS, channels)
    slots = slots_for(layout, torch.zeros(6, 1), before)
    new = torch.randn(sum(piece[2] for piece in layout), channels)
    extended = slots.extend(new)
    output = convolve(extended, conv, slots)
    slots.keep(extended)
    pieces = torch.split(new, [piece[2] for piece in layout])
    for (slot, again, count, drafts), (_, rows, _), piece in zip(
        layout, rows_of(layout), pieces, strict=True
    ):
        history = torch.cat([before[slot, : 3 + again], piece]).T  # [channels, 3 + again + tokens]
        expected = conv(history[None])[0, :, 3 : 3 + again + count].T
        torch.testing.assert_close(output[list(rows)], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slots.rows[slot, : 3 + drafts], history[:, -3 - drafts :].T)
    assert_untouched(layout, slots.rows, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strongest", [0.1, 30.0])
def test_the_selective_scan_is_its_recurrence(layout: Layout, strongest: float) -> None:
    torch.manual_seed(1)
    num_tokens, channels, size = num_mixed(layout), 5, 3
    inputs, before = torch.randn(num_tokens, channels), torch.randn(6, channels, size)
    steps, rates = torch.rand(num_tokens, channels) * strongest, -torch.rand(channels, size) - 0.1
    b, c = torch.randn(2, num_tokens, size)
    slots = slots_for(layout, before)
    output = selective_scan(SelectiveInputs(inputs, steps, rates, b, c), slots)
    for slot, rows, num_taken in rows_of(layout):
        state = before[slot].double()
        for place, row in enumerate(rows):
            state = torch.exp(steps[row, :, None].double() * rates) * state
            state += (steps[row] * inputs[row])[:, None].double() * b[row]
            torch.testing.assert_close(output[row].double(), state @ c[row].double(), rtol=1e-4, atol=1e-4)
            if place == num_taken - 1:
                torch.testing.assert_close(slots.state[slot].double(), state, rtol=1e-4, atol=1e-4)
    assert_untouched(layout, slots.state, before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_diagonal_scan_is_its_recurrence(layout: Layout) -> None:
    torch.manual_seed(3)
    num_tokens, channels = num_mixed(layout), 5
    inputs, before = torch.randn(num_tokens, channels), torch.randn(6, channels)
    decays = torch.rand(num_tokens, channels)
    slots = slots_for(layout, before)
    output = diagonal_scan(inputs, decays, slots)
    for slot, rows, num_taken in rows_of(layout):
        state = before[slot].double()
        for place, row in enumerate(rows):
            state = decays[row].double() * state + inputs[row]
            torch.testing.assert_close(output[row].double(), state, rtol=1e-4, atol=1e-4)
            if place == num_taken - 1:
                torch.testing.assert_close(slots.state[slot].double(), state, rtol=1e-4, atol=1e-4)
    assert_untouched(layout, slots.state, before)


def uneven(shape: tuple[int, ...], strongest: float) -> torch.Tensor:
    """A weak decay after strong ones must not lose its digits in the difference of two large sums."""
    return torch.where(torch.rand(shape) < 0.5, torch.rand(shape) * strongest, torch.tensor(0.01))


@pytest.mark.by_default
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strongest", [0.1, 30.0])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_the_structured_scan_is_its_recurrence(layout: Layout, strongest: float, num_groups: int) -> None:
    torch.manual_seed(2)
    num_tokens, heads, dim, size = num_mixed(layout), 4, 3, 5
    inputs, before = torch.randn(num_tokens, heads, dim), torch.randn(6, heads, dim, size)
    logs = -uneven((num_tokens, heads), strongest)
    b, c = torch.randn(2, num_tokens, num_groups, size)
    slots = slots_for(layout, before)
    output = structured_scan(StructuredInputs(inputs, logs, b, c), slots)
    each = heads // num_groups
    for slot, rows, num_taken in rows_of(layout):
        state = before[slot].double()
        for place, row in enumerate(rows):
            state = torch.exp(logs[row].double())[:, None, None] * state
            fed = inputs[row].double()[:, :, None]
            state = state + fed * b[row].repeat_interleave(each, 0)[:, None].double()
            expected = (state @ c[row].repeat_interleave(each, 0)[:, :, None].double())[:, :, 0]
            torch.testing.assert_close(output[row].double(), expected, rtol=1e-4, atol=1e-4)
            if place == num_taken - 1:
                torch.testing.assert_close(slots.state[slot].double(), state, rtol=1e-4, atol=1e-4)
    assert_untouched(layout, slots.state, before)


@pytest.mark.by_default
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strongest", [0.1, 30.0])
@pytest.mark.parametrize("channels", [1, 6])
def test_the_delta_scan_is_its_recurrence(layout: Layout, strongest: float, channels: int) -> None:
    torch.manual_seed(4)
    num_tokens, heads, dim, size = num_mixed(layout), 2, 6, 4
    query, key = torch.randn(2, num_tokens, heads, dim) / dim**0.5
    key = key / key.norm(dim=-1, keepdim=True)
    value, beta = torch.randn(num_tokens, heads, size), torch.rand(num_tokens, heads) * 2
    logs, before = -uneven((num_tokens, heads, channels), strongest), torch.randn(6, heads, dim, size)
    slots = slots_for(layout, before)
    output = delta_scan(DeltaInputs(query, key, value, logs, beta), slots)
    for slot, rows, num_taken in rows_of(layout):
        state = before[slot].double()
        for place, row in enumerate(rows):
            k = key[row].double()
            state = torch.exp(logs[row].double())[:, :, None] * state
            wrong = value[row] - torch.einsum("hk,hkv->hv", k, state)
            state = state + torch.einsum("hk,hv->hkv", k, beta[row, :, None] * wrong)
            expected = torch.einsum("hk,hkv->hv", query[row].double(), state)
            torch.testing.assert_close(output[row].double(), expected, rtol=1e-3, atol=1e-4)
            if place == num_taken - 1:
                torch.testing.assert_close(slots.state[slot].double(), state, rtol=1e-3, atol=1e-4)
    assert_untouched(layout, slots.state, before)


def test_what_is_not_finite_in_one_sequence_stays_there() -> None:
    """Padding is never another's row: a NaN spoils a product even with nought."""
    layout: Layout = [(0, 0, 3, 0), (1, 0, 5, 0)]
    heads, dim = 2, 4
    query, key, value = torch.randn(3, 8, heads, dim)
    key[:3] = torch.nan
    slots = slots_for(layout, torch.zeros(6, heads, dim, dim))
    inputs = DeltaInputs(query, key, value, -torch.rand(8, heads, 1), torch.rand(8, heads))
    assert delta_scan(inputs, slots)[3:].isfinite().all() and slots.state[1].isfinite().all()
    slots = slots_for(layout, torch.zeros(6, heads, dim, dim))
    assert (
        structured_scan(StructuredInputs(value, inputs.logs[..., 0], key, query), slots)[3:].isfinite().all()
    )
    assert slots.state[1].isfinite().all()
