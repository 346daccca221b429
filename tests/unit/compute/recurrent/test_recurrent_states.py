"""Slots hold what a sequence has seen and nothing else, and the scans are the recurrences they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from engine.compute.recurrent.slot_states import LayerSlots, LayerState, SlotStates, state_bytes
from engine.compute.recurrent.state_space import convolve, selective_scan, structured_scan
from engine.compute.runner.dummy_steps import Part
from engine.errors import RewindError, RewindFault
from engine.plan.step_records import DraftInputs, StepInputs
from tests.support.recurrent import pack_slots

CPU = torch.device("cpu")
STATES = (LayerState(0, 6, 3, (4, 2)), LayerState(2, 10, 3, (2, 3, 5)))


def step_of(*pieces: tuple[int, int, int]) -> StepInputs:
    """A step of (slot, first, stop), in packed order."""
    return pack_slots({slot: Part([5] * stop, first, stop, range(99)) for slot, first, stop in pieces})


def make_states(num_slots: int = 6) -> SlotStates:
    return SlotStates(STATES, num_slots, torch.bfloat16, CPU)


# --- sizes ---


def test_slots_cost_what_they_are_said_to() -> None:
    states = make_states(num_slots=7)
    tensors = [*states.conv.values(), *states.state.values()]
    assert sum(tensor.nbytes for tensor in tensors) == state_bytes(STATES, torch.bfloat16, 7)
    assert state_bytes(STATES, torch.bfloat16) == (6 + 10) * 3 * 2 + (4 * 2 + 2 * 3 * 5) * 4
    assert state_bytes((), torch.float32, 100) == 0
    assert {tensor.dtype for tensor in states.state.values()} == {torch.float32}


# --- which slots a pass continues ---


def test_single_tokens_are_put_in_order_of_their_slots() -> None:
    states = make_states()
    step = states.begin(step_of((3, 0, 1), (1, 0, 1), (2, 0, 1), (5, 0, 4), (0, 0, 2)))
    assert step.single_slots == slice(1, 4)  # in one run: changed in place
    assert isinstance(step.single_rows, torch.Tensor) and step.single_rows.tolist() == [1, 2, 0]
    assert step.runs == ((slice(3, 7), 5), (slice(7, 9), 0))


def test_slots_with_a_gap_are_gathered() -> None:
    step = make_states().begin(step_of((0, 0, 1), (2, 0, 1)))
    assert step.single_rows == slice(0, 2)
    assert isinstance(step.single_slots, torch.Tensor) and step.single_slots.tolist() == [0, 2]
    assert step.num_singles == 2 and step.runs == ()


def test_a_sequence_that_begins_finds_zeros_and_its_neighbours_keep_theirs() -> None:
    states = make_states()
    states.begin(step_of((1, 0, 1), (2, 0, 3)))
    states.commit_states(step_of((1, 0, 1), (2, 0, 3)))
    tensors = [*states.conv.values(), *states.state.values()]
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
        (5, RewindFault.POSITION_BEYOND_END),
    ],
)
def test_a_state_goes_on_where_it_ended_and_nowhere_else(first: int, fault: RewindFault) -> None:
    states = make_states()
    states.begin(step_of((2, 0, 4)))
    states.commit_states(step_of((2, 0, 4)))
    with pytest.raises(RewindError, match=rf"slot 2 has seen 4 tokens.* position {first}") as refused:
        states.begin(step_of((0, 0, 1), (2, first, first + 1)))
    assert refused.value.fault is fault
    states.begin(step_of((2, 4, 6)))  # nothing has changed


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


def test_drafts_are_refused() -> None:
    drafts = DraftInputs(
        np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int32), np.ones(1, np.int64)
    )
    with pytest.raises(RewindError, match="no drafts") as refused:
        make_states().begin(replace(step_of((0, 0, 2)), drafts=drafts))
    assert refused.value.fault is RewindFault.NOT_SUPPORTED


# --- the recurrences, against one token at a time in double precision ---

# (slot, tokens) in packed order: singles apart and together, runs shorter and longer than a block.
LAYOUTS = [
    [(0, 1), (1, 1), (2, 1)],
    [(4, 1), (0, 1), (2, 5)],
    [(3, 2), (1, 64)],
    [(5, 1), (0, 65), (4, 150)],
]


def slots_for(layout: list[tuple[int, int]], conv: torch.Tensor, state: torch.Tensor) -> LayerSlots:
    step = make_states().begin(step_of(*((slot, 0, count) for slot, count in layout)))
    return LayerSlots(step, conv.clone(), state.clone())


def rows_of(layout: list[tuple[int, int]]) -> list[tuple[int, range]]:
    ends = np.cumsum([count for _, count in layout]).tolist()
    return [(slot, range(end - count, end)) for (slot, count), end in zip(layout, ends, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_goes_on_from_the_inputs_before(layout: list[tuple[int, int]], bias: bool) -> None:
    torch.manual_seed(0)
    channels, num_tokens = 10, sum(count for _, count in layout)
    conv = nn.Conv1d(channels, channels, 4, groups=channels, padding=3, bias=bias).requires_grad_(False)
    before, inputs = torch.randn(6, channels, 3), torch.randn(num_tokens, channels)
    slots = slots_for(layout, before, torch.zeros(6, 1))
    output = convolve(inputs, conv, slots)
    for slot, rows in rows_of(layout):
        history = torch.cat([before[slot], inputs[list(rows)].T], dim=1)  # [channels, 3 + tokens]
        expected = conv(history[None])[0, :, 3 : 3 + len(rows)].T
        torch.testing.assert_close(output[list(rows)], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slots.conv[slot], history[:, -3:])
    untouched = [slot for slot in range(6) if slot not in dict(layout)]
    assert torch.equal(slots.conv[untouched], before[untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strongest", [0.1, 30.0])
def test_the_selective_scan_is_its_recurrence(layout: list[tuple[int, int]], strongest: float) -> None:
    torch.manual_seed(1)
    num_tokens, channels, size = sum(count for _, count in layout), 5, 3
    inputs, before = torch.randn(num_tokens, channels), torch.randn(6, channels, size)
    steps, rates = torch.rand(num_tokens, channels) * strongest, -torch.rand(channels, size) - 0.1
    b, c = torch.randn(2, num_tokens, size)
    slots = slots_for(layout, torch.zeros(6, 1, 3), before)
    output = selective_scan(inputs, steps, rates, (b, c), slots)
    for slot, rows in rows_of(layout):
        state = before[slot].double()
        for row in rows:
            state = torch.exp(steps[row, :, None].double() * rates) * state
            state += (steps[row] * inputs[row])[:, None].double() * b[row]
            torch.testing.assert_close(output[row].double(), state @ c[row].double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(slots.state[slot].double(), state, rtol=1e-4, atol=1e-4)
    untouched = [slot for slot in range(6) if slot not in dict(layout)]
    assert torch.equal(slots.state[untouched], before[untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strongest", [0.1, 30.0])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_the_structured_scan_is_its_recurrence(
    layout: list[tuple[int, int]], strongest: float, num_groups: int
) -> None:
    torch.manual_seed(2)
    num_tokens, heads, dim, size = sum(count for _, count in layout), 4, 3, 5
    inputs, before = torch.randn(num_tokens, heads, dim), torch.randn(6, heads, dim, size)
    # A weak decay after strong ones must not lose its digits in the difference of two large sums.
    steps = torch.where(
        torch.rand(num_tokens, heads) < 0.5, torch.rand(num_tokens, heads) * strongest, torch.tensor(0.01)
    )
    rates = -torch.rand(heads) - 0.1
    b, c = torch.randn(2, num_tokens, num_groups, size)
    slots = slots_for(layout, torch.zeros(6, 1, 3), before)
    output = structured_scan(inputs, steps, rates, (b, c), slots)
    each = heads // num_groups
    for slot, rows in rows_of(layout):
        state = before[slot].double()
        for row in rows:
            state = torch.exp(steps[row].double() * rates)[:, None, None] * state
            fed = (steps[row, :, None] * inputs[row]).double()[:, :, None]
            state += fed * b[row].repeat_interleave(each, 0)[:, None].double()
            expected = (state @ c[row].repeat_interleave(each, 0)[:, :, None].double())[:, :, 0]
            torch.testing.assert_close(output[row].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(slots.state[slot].double(), state, rtol=1e-4, atol=1e-4)
    untouched = [slot for slot in range(6) if slot not in dict(layout)]
    assert torch.equal(slots.state[untouched], before[untouched])
