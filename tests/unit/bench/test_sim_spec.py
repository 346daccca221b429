"""The real loop, under a virtual clock, keeps the formulas of drafting; the figures of `make sim-spec`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.plan.request import SamplingParams
from engine.plan.speculation.drafter import DraftJob, DraftRequest
from tests.bench.sim_spec.cell import Cell, free_speedup, measure
from tests.bench.sim_spec.choices import best_fixed, choose_schedule
from tests.bench.sim_spec.grid import CENTRE, Row, grid_section
from tests.bench.sim_spec.pair import SetDrafter, token_at
from tests.bench.sim_spec.plots import plot_grid

UNITS = {1: 3000, 16: 480}
CELL = Cell(*CENTRE, num_seqs=1, schedule="async")


@pytest.mark.parametrize("num_seqs", UNITS)
def test_drafting_beside_the_target_gains_what_it_should(num_seqs: int, tmp_path: Path) -> None:
    beside = replace(CELL, num_seqs=num_seqs)
    before = replace(beside, schedule="sync")
    row = Row(beside, *(measure(cell, UNITS[num_seqs], seed=7) for cell in (before, beside)))
    section = grid_section([row])
    assert len(section.bars) == 2
    for bar in section.bars:
        assert bar.met, f"{bar.name}: {bar.measured} against {bar.limit}"
    for rate in (row.before, row.beside):
        assert 0 < rate.error_percent < 1.5
    assert plot_grid([row], tmp_path).stat().st_size > 10_000


@pytest.mark.by_default("cell0", "cell2", "cell3")
@pytest.mark.parametrize(
    "cell",
    [
        replace(CELL, alpha=0.5, cost_ratio=0.1, max_drafts=2, num_seqs=4),
        replace(CELL, alpha=0.9, cost_ratio=0.1, max_drafts=8, num_seqs=4),
        replace(CELL, alpha=0.9, cost_ratio=0.05, max_drafts=8, num_seqs=4, schedule="sync"),
        replace(CELL, slowdown=1.5, num_seqs=4),
    ],
)
def test_other_cells_keep_their_formulas(cell: Cell) -> None:
    rate = measure(cell, 800, seed=11)
    assert rate.value == pytest.approx(cell.formula, rel=0.05)


def test_the_server_s_own_gauges_are_the_formula_and_what_is_measured() -> None:
    """Of synchronous drafts, which step after step are as long as each other."""
    cell = replace(CELL, alpha=0.8, cost_ratio=0.1, max_drafts=4, num_seqs=16, schedule="sync")
    rate = measure(cell, 320, seed=7)
    terms = rate.gauges.formula
    assert terms.alpha == pytest.approx(0.8, rel=0.05)
    assert terms.gamma == pytest.approx(4)
    assert terms.cost_ratio == pytest.approx(0.1, rel=0.01)
    assert rate.gauges.speculation_theoretical_speedup == pytest.approx(cell.formula, rel=0.07)
    assert rate.gauges.speculation_speedup == pytest.approx(rate.value, rel=0.07)
    beside = measure(replace(cell, schedule="async"), 320, seed=7).gauges.formula
    assert beside.cost_ratio == 0, "nothing is waited for"
    assert 0 < beside.gamma < 4, "after a miss there are no drafts"


def test_auto_takes_the_best_schedule() -> None:
    choice = choose_schedule("sync", 16, 400, seed=3)
    assert choice.chosen == "sync"
    assert choice.share >= 0.95
    assert choice.rates["off"].value == pytest.approx(1.0)


def test_a_batch_shares_the_wait_for_a_micro_step() -> None:
    cell = replace(CELL, num_seqs=16, max_drafts=8, schedule="sync", policy="goodput")
    assert measure(cell, 320, seed=5, warm_up=100).value > 0.95 * (best_fixed(cell).formula or 0)


def test_formulas_are_only_given_where_they_hold() -> None:
    assert replace(CELL, cost_ratio=0.2, max_drafts=4).formula == pytest.approx(2.2832, abs=1e-4)
    assert replace(CELL, cost_ratio=0.21, max_drafts=4).formula is None
    assert replace(CELL, cost_ratio=0.21, schedule="sync").formula is not None
    assert replace(CELL, schedule="auto").formula is None
    assert best_fixed(replace(CELL, max_drafts=8, policy="goodput")) == CELL


def test_the_drafter_is_right_as_often_as_set_and_never_after_a_mistake() -> None:
    drafter = SetDrafter(alpha=0.7, step_s=0.1, clock=lambda: 1.0)
    about = DraftRequest("a", 1, SamplingParams(max_tokens=8, seed=5))
    num_right = 0
    for position in range(1, 4001):
        known = (token_at(5, position - 1),)
        draft = drafter.draft([DraftJob(about, 0, position - 1, known, position, 2)]).drafts[0]
        is_right = draft.token_ids == (token_at(5, position),)
        num_right += is_right
        ahead = drafter.draft([DraftJob(about, 0, position + 1, (), position, 1)]).drafts[0]
        assert is_right or ahead.token_ids != (token_at(5, position + 1),)
    assert num_right / 4000 == pytest.approx(0.7, abs=0.03)
    assert drafter.is_out


def test_going_free_agrees_with_its_simulation() -> None:
    assert free_speedup(4, 0.8) == pytest.approx(2.2832, abs=1e-4)
    assert free_speedup(4, 0.8, slowdown=1.25) == pytest.approx(free_speedup(4, 0.8) / 1.25)
    assert free_speedup(4, 1.0) == 5
