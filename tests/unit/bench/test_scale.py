"""Scale curves: which cells fit, prompts that are not computed, and the price of one more request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from engine.compute.runner.dummy_steps import Part, pack_step
from engine.loop.engine_parts import EngineInfo
from tests.bench.host import HostStep, host_step
from tests.bench.scale import Cell, WithoutPrompts, cost_of_one
from tests.bench.scale_plot import plot_scale
from tests.support.engines import text_tokenizer
from tests.support.fakes import FakeRunner


def test_a_cell_needs_positions_and_blocks_with_room_for_one_more_each() -> None:
    info = EngineInfo(2048, 100, "float32", "cpu", 2 * 129, 16, 0, False)
    fitting = [Cell(2, 2048), Cell(28, 128), Cell(1, 2048)]
    assert all(cell.fits(info) for cell in fitting)
    assert not any(cell.fits(info) for cell in (Cell(3, 2048), Cell(1, 2049), Cell(29, 128)))


def test_only_decodes_are_computed() -> None:
    runner = FakeRunner(8, 4)
    part = Part(list(range(20, 30)), 0, 10, range(3))
    decode = part._replace(first=9)
    prompt = WithoutPrompts(runner).run(pack_step([part], 4))
    assert (prompt.rows.token_ids, prompt.forward_s) == ([0], 0.0)
    mixed = WithoutPrompts(runner).run(pack_step([decode, part._replace(blocks=range(3, 6))], 4))
    assert mixed.rows.token_ids == [0, 0]
    runner.run(pack_step([part], 4))
    expected = runner.run(pack_step([decode], 4))
    assert WithoutPrompts(runner).run(pack_step([decode], 4)).rows == expected.rows


async def test_requests_that_wait_do_not_run_while_a_step_is_timed() -> None:
    step = await host_step(text_tokenizer(), list(range(100, 150)), batch=3, num_steps=10, num_waiting=20)
    assert 5 < step.cpu_us < 1e6


def test_the_price_of_one_request_is_what_all_of_them_add() -> None:
    few, many = [HostStep(9.0, 100.0)] * 2, [HostStep(9.0, 150.0), HostStep(9.0, 90.0)]
    assert cost_of_one(few, many, 10) == pytest.approx([5.0, -1.0])


def test_the_plot_has_a_line_for_each_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, **style: lines.append((style["label"], x, list(y))))
    monkeypatch.setattr(Axes, "legend", lambda self, **style: None)
    points = [(8, 128, 0.02, 0.1), (1, 128, 0.01, 0.05), (1, 512, 0.04, 0.02)]
    assert plot_scale(points, tmp_path / "new").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(json.dumps(lines[:2])) == [["128", [1, 8], [100, 400]], ["512", [1], [25]]]
