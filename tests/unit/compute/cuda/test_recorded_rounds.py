"""Rounds of a layer that are recorded: the drafts of operations that are queued one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.compute.attention import AttentionBackend, CpuAttention, LayerCall, StepAttention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.cuda.graphs.recorded_rounds import RecordedSteps, recorded_round_bytes, round_sizes
from engine.compute.cuda.graphs.step_graphs import TabledAttention
from engine.compute.cuda.round_choice import MakeQuick, fastest_steps, find_steps
from engine.compute.cuda.triton_tables import StepTables
from engine.compute.drafters.eagle_kv import EagleKv
from engine.compute.drafters.eagle_loader import EagleRoom
from engine.compute.drafters.eagle_round import GUESSES
from engine.compute.drafters.layer_chains import DraftLayer, EagerSteps, LayerChains
from engine.compute.drafters.slab_rows import RowsTogether, SlabRows
from engine.plan.step_records import StepInputs
from tests.support.captured_log import captured_log
from tests.support.eagle_rounds import Case, assert_same_rounds, eagle_case, made_round, mtp_case
from tests.support.packed import load_tiny
from tests.support.played_back import play_back_rounds
from tests.support.recorded import Playback, TabledReference, TabledStep
from tests.support.speculated import single_threaded
from tests.support.tiny_mtp import FAMILIES

WINDOW = 12
ROOM = EagleRoom(max_num_seqs=8, kv_bytes=1 << 26)


# Of eight slabs.
SIZES = tuple(round_sizes(8))


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def eagle(small: None, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return eagle_case(tmp_path_factory.mktemp("eagle") / "heads")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_rounds_are_those_of_operations(temperature: float, eagle: Case) -> None:
    recorded = eagle.recorded(eagle.kv())
    assert isinstance(recorded, RecordedSteps) and recorded.sizes == SIZES
    assert_same_rounds(eagle, recorded, temperature)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_next"])
def test_chains_of_modules_are_recorded(family: str, tmp_path: Path) -> None:
    case = mtp_case(family, tmp_path / "model")
    recorded = case.recorded(case.kv())
    assert isinstance(recorded, RecordedSteps) and recorded.sizes == SIZES
    assert_same_rounds(case, recorded)


def test_rows_attend_together_as_apart(eagle: Case) -> None:
    kv = eagle.kv()
    together = EagerSteps(eagle.layer, partial(RowsTogether, TabledReference(), kv), GUESSES)
    assert_same_rounds(eagle, together)


@pytest.fixture
def calls(eagle: Case, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the layer was computed for, each time."""
    seen: list[int] = []
    compute = eagle.layer.compute

    def watched(hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        seen.append(len(hidden))
        return compute(hidden, token_ids, rows)

    monkeypatch.setattr(eagle.layer, "compute", watched)
    return seen


@pytest.mark.parametrize(
    ("rows", "drafts", "expected"),
    [
        ([2, 1, 1], [4, 4, 1], [8, 2, 2, 2]),
        ([2, 9, 1], [2, 2, 2], [16, 4]),
        ([48], [3], [64, 1, 1]),
        ([49], [3], [49, 1, 1]),  # more of one sequence than its kernel takes
        ([1], [0], [8]),
    ],
)
def test_each_step_is_replayed_in_the_smallest_recording_that_holds_it(
    rows: list[int], drafts: list[int], expected: list[int], eagle: Case, calls: list[int]
) -> None:
    like = eagle.kv()
    kv = EagleKv(like.tensors.layers[0], 64, 8, like.most_drafts, like.keys)
    recorded = eagle.recorded(kv)
    calls.clear()
    LayerChains(recorded, 0.0).run(made_round(rows, drafts, [0] * len(rows)))
    assert calls == expected


@pytest.mark.parametrize(
    ("reading", "drawing", "sizes"),
    [((8, 16), (1, 2), [(0, 1), (0, 2), (8, 2), (16, 2)]), ((2,), (1, 2, 4, 8), None)],
)
def test_what_no_recording_holds_is_computed_one_by_one(
    reading: tuple[int, ...],
    drawing: tuple[int, ...],
    sizes: list[tuple[int, int]] | None,
    eagle: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some rounds are read eagerly and drawn by recordings, some are eager altogether."""
    monkeypatch.setattr("engine.compute.cuda.graphs.recorded_rounds._READING", reading)
    monkeypatch.setattr("engine.compute.cuda.graphs.recorded_rounds._DRAWING", drawing)
    recorded = eagle.recorded(eagle.kv())
    assert isinstance(recorded, RecordedSteps) and (sizes is None or [*recorded.sizes] == sizes)
    assert_same_rounds(eagle, recorded)


def test_what_cannot_be_recorded_attends_together(eagle: Case) -> None:
    kv = eagle.kv()
    with captured_log() as log:
        steps = eagle.recorded(kv, Playback(None, RuntimeError("no such operation\nmore")))
    assert isinstance(steps, EagerSteps) and steps is not eagle.eager(kv)
    assert_same_rounds(eagle, steps)
    (line,) = log.lines
    assert "Rounds of drafts are not CUDA graphs: no such operation" in line and "more" not in line


class _Wrong(TabledReference):
    """Attends to something else, together or when recorded."""

    def __init__(self, *, in_tables: bool) -> None:
        self._in_tables = in_tables

    def plan(self, inputs: StepInputs, kv: KvTensors) -> StepAttention:
        step = super().plan(inputs, kv)
        return step if self._in_tables else _Halved(step)

    def step(self, tables: StepTables, kv: KvTensors) -> TabledStep:
        return _HalvedTabled(tables, kv)


class _Halved:
    def __init__(self, step: StepAttention) -> None:
        self.write, self._attend = step.write, step.attend

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return self._attend(query, call) / 2


class _HalvedTabled(TabledStep):
    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return super().attend(query, call) / 2


def test_what_computes_otherwise_is_not_used(eagle: Case) -> None:
    kv = eagle.kv()
    eager = eagle.eager(kv)
    for in_tables in (False, True):
        with captured_log() as log:
            backend = _Wrong(in_tables=in_tables)
            found = find_steps(eager, kv, eagle.width, backend, Playback())
        assert (found is eager) == (not in_tables) and isinstance(found, EagerSteps)
        (line,) = log.lines
        assert "computed otherwise" in line and ("replayed" in line) == in_tables
        assert not any(tensor.any() for tensor in kv.tensors.tensors), "slabs are empty as before"


class _Quick:
    """A layer of kernels in place of another, which it makes of that one."""

    def __init__(self, layer: DraftLayer, factor: float = 1.0) -> None:
        self._layer = layer
        self._factor = factor
        self.token_ids, self.read, self.again = layer.token_ids, layer.read, layer.again
        self.logits = layer.logits

    def compute(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: SlabRows) -> torch.Tensor:
        return self._layer.compute(hidden * self._factor, token_ids, rows)


def test_a_layer_of_kernels_is_used_where_it_answers_alike(
    eagle: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_back_rounds(monkeypatch)
    alike, other = _Quick(eagle.layer), _Quick(eagle.layer, 3.0)

    def failing(backend: AttentionBackend) -> DraftLayer:
        raise RuntimeError("it does not compile\nsomewhere")

    ways: list[tuple[MakeQuick, DraftLayer, str]] = [
        (lambda _: alike, alike, "recorded"),
        (lambda _: other, eagle.layer, "computed otherwise"),
        (lambda _: None, eagle.layer, "recorded"),
        (failing, eagle.layer, "not fused: it does not compile"),
    ]
    for make, layer, told in ways:
        kv = eagle.kv()
        with captured_log() as log:
            found = fastest_steps(eagle.eager(kv), kv, eagle.width, make)
        assert isinstance(found, RecordedSteps) and found.layer is layer
        assert told in log.lines[0] and "recorded" in log.lines[-1] and "somewhere" not in log.text
        assert_same_rounds(eagle, found)


def test_a_layer_that_cannot_be_computed_fails_its_drafts_and_no_start(
    eagle: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("no such operation")

    kv = eagle.kv()
    eager = eagle.eager(kv)
    monkeypatch.setattr(eagle.layer, "compute", failing)
    with captured_log() as log:
        assert find_steps(eager, kv, eagle.width, TabledReference(), Playback()) is eager
    (line,) = log.lines
    assert "not CUDA graphs: no such operation" in line


def test_other_devices_keep_their_steps(eagle: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = eagle.kv()
    eager = eagle.eager(kv)
    assert fastest_steps(eager, kv, eagle.width) is eager
    assert not isinstance(CpuAttention(), TabledAttention)
    play_back_rounds(monkeypatch)
    assert isinstance(fastest_steps(eager, kv, eagle.width), RecordedSteps)


def test_as_many_are_recorded_as_there_may_be() -> None:
    assert round_sizes(1) == [(0, 1), *((rows, 1) for rows in (8, 16, 32, 64))]
    assert round_sizes(3)[:3] == [(0, 1), (0, 2), (0, 4)] and round_sizes(3)[3:5] == [(8, 4), (16, 4)]
    assert round_sizes(1000)[8:10] == [(0, 256), (8, 8)] and round_sizes(1000)[-1] == (512, 256)
    target = load_tiny("llama")
    logits = 4 * target.vocab_size * 16
    assert recorded_round_bytes(target, 64, 3) == (3 + 6 << 24) + 256 * 64 * 4 + logits
