"""The GPU benchmark itself: its arithmetic, its made models, and each section with tiny models on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.compute.meta_device import on_meta_device
from engine.compute.runner.dummy_steps import Part as StepPart
from engine.compute.runner.dummy_steps import pack_step
from engine.compute.runner.packed_forward import PackedForward
from tests.bench.gpu import command
from tests.bench.gpu.engines import last_tokens, settings_for
from tests.bench.gpu.guided import compiled
from tests.bench.gpu.idle import gaps_of
from tests.bench.gpu.made_models import (
    make_model,
    make_tokenizer,
    make_walk,
    product_operations,
    random_walk,
    strayed,
    token_bytes,
    weight_bytes,
)
from tests.bench.gpu.sizes import FULL, SMALL, LlamaShape
from tests.bench.report import Bar, Section
from tests.support.played_back import on_device, play_back_rounds, play_back_targets
from tests.support.structures import allowed

CPU = torch.device("cpu")


def test_gaps_between_steps_are_the_long_ones() -> None:
    busy = [(0.0, 40.0), (30.0, 50.0), (52.0, 80.0), (100.0, 100.0)]
    assert gaps_of(busy, min_gap=10.0) == (20.0, 22.0)
    with pytest.raises(ValueError, match="did nothing"):
        gaps_of([], min_gap=10.0)


def test_a_walk_visits_every_token_and_strays_as_often_as_asked() -> None:
    walk = random_walk(1000)
    token, seen = 0, set()
    for _ in range(1000):
        seen.add(token)
        token = int(walk[token])
    assert len(seen) == 1000 and token == 0
    other = strayed(walk, 0.8)
    assert sorted(other.tolist()) == list(range(1000))
    assert int((other == walk).sum()) == 800


def test_a_made_model_walks() -> None:
    loaded = make_model(SMALL.large.config(tied=False), torch.float32, CPU, 64)
    walk = random_walk(SMALL.large.vocab)
    make_walk(loaded, walk)
    forward = PackedForward(loaded)
    tokens = list(range(100, 140))
    inputs = pack_step([StepPart(tokens, 0, 40, range(3))], 16, every_row=True)
    with torch.inference_mode():
        drawn = forward(inputs, forward.make_kv(3, 16)).argmax(-1)
    assert drawn.tolist() == walk[tokens].tolist()


def test_bytes_and_operations_are_those_of_the_shapes() -> None:
    small = make_model(SMALL.small.config(), torch.float32, CPU, 64)  # tied
    large = make_model(SMALL.large.config(), torch.float32, CPU, 64)
    shape = SMALL.large
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64  # q o, k v, mlp, norms
    assert weight_bytes(large) == 4 * (2 * layer + 64 + shape.vocab * 64)
    assert weight_bytes(small) == 4 * sum(parameter.numel() for parameter in small.model.parameters())
    assert product_operations(large) == 2 * (2 * layer + 64)
    assert token_bytes(large) == 2 * 2 * 2 * 16 * 4


def test_the_shapes_are_those_of_the_models_they_are_named_after() -> None:
    from transformers import AutoModelForCausalLM

    def count(shape: LlamaShape) -> int:
        with torch.device("meta"):
            return int(AutoModelForCausalLM.from_config(shape.config()).num_parameters())

    sizes = [on_meta_device(partial(count, shape)) for shape in (FULL.small, FULL.large)]
    assert sizes == [1_235_814_400, 8_030_261_248]
    boxes = sum(part.seconds for part in command.PARTS.values() if part.is_of_all)
    assert boxes <= 540


def test_last_tokens_keep_what_draws() -> None:
    parts = [
        StepPart(range(40), 7, 8, (0,)),
        StepPart(range(40), 0, 20, (1, 2)),
        StepPart(range(40), 4, 9, (3,)),
    ]
    inputs = pack_step(parts, 16)
    inputs = replace(inputs, logits_rows=inputs.logits_rows[[0, 2]], previous_rows=np.arange(26) - 20)
    found = last_tokens(inputs)
    assert found.token_ids.tolist() == [7, 19, 8]
    assert found.positions.tolist() == [7, 19, 8]
    assert found.slot_mapping.tolist() == [7, 2 * 16 + 3, 3 * 16 + 8]
    assert found.query_lens.tolist() == [1, 1, 1] and found.kv_lens.tolist() == [8, 20, 9]
    assert found.logits_rows.tolist() == [0, 2]
    assert found.previous_rows is not None and found.previous_rows.tolist() == [-20, 0, 5]


def test_a_tokenizer_has_text_for_every_token() -> None:
    tokenizer = make_tokenizer(512)
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode([2, 511], skip_special_tokens=True) == " w0 w509"


def test_one_that_spells_can_begin_the_schema_and_say_anything_inside() -> None:
    tokenizer = make_tokenizer(512, spells=True)
    assert tokenizer.vocab_size == 512
    schema = compiled(tokenizer)
    assert schema is not None
    state = schema.start(frozenset())
    byte_of = {tokenizer.decode([token_id], skip_special_tokens=False): token_id for token_id in range(258)}
    for letter in '{"lines":["':
        assert byte_of[letter] in allowed(state.mask(()), 512)
        assert 511 not in allowed(state.mask(()), 512), "no word comes before the first string"
        assert not state.accept(byte_of[letter])
    assert set(range(258, 512)) <= allowed(state.mask(()), 512)


def test_settings_hold_all_sequences_at_once() -> None:
    settings = settings_for(4, 100)
    assert settings.cache.num_kv_blocks == 4 * 8
    assert settings.speculation.speculative_method == "none" and not settings.cache.prefix_caching


@pytest.mark.parametrize("name", ["prefill", "curve", "codes", "experts"])
def test_a_section_with_tiny_models(name: str, tmp_path: Path) -> None:
    assert command.run_part(name, tmp_path / "found", small=True) == 0
    section = command.section_of(name, json.loads((tmp_path / "found").read_text()))
    assert section.measurements and all(one.median is not None for one in section.measurements)
    assert len(section.bars) == {"prefill": 1, "curve": 0, "codes": 6, "experts": 4}[name]


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets and draft models run as they do on a GPU."""
    play_back_targets(monkeypatch)
    play_back_rounds(monkeypatch)
    monkeypatch.setattr("tests.bench.gpu.drafts.on_device", on_device)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures each thing once, after few steps: its figures mean nothing here."""
    for name in ("decode.RUNS", "drafts.RUNS", "guided._RUNS", "steps._RUNS"):
        monkeypatch.setattr(f"tests.bench.gpu.{name}", 1)
    for name in ("engines", "decode", "guided", "states"):
        monkeypatch.setattr(f"tests.bench.gpu.{name}.SETTLE_STEPS", 4)


@pytest.mark.usefixtures("as_on_cuda", "once")
@pytest.mark.parametrize(
    ("name", "num_bars"),
    [("decode", 3), ("steps", 1), ("drafts", 3), ("guided", 2), ("states", 3), ("rounds", 1)],
)
def test_a_section_on_the_runner_of_a_gpu(
    name: str, num_bars: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slipstream")
    assert command.run_part(name, tmp_path / "found", small=True) == 0
    section = command.section_of(name, json.loads((tmp_path / "found").read_text()))
    assert all(one.median is not None for one in section.measurements)
    assert "recorded" in caplog.text and len(section.bars) == num_bars


def test_what_takes_long_is_measured_where_it_is_named() -> None:
    assert not {"codes", "experts", "states", "rounds"} & set(command.read_arguments([]).wanted)
    assert command.read_arguments(["codes", "steps"]).wanted == ["steps", "codes"]


@pytest.mark.slow
@pytest.mark.timeout(480)  # six processes
def test_the_whole_command_with_tiny_models(tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    assert command.run([*command.PARTS, "--small", "--json", str(found)]) == 0
    report = json.loads(found.read_text())
    assert list(report["sections"]) == list(command.PARTS) and not report["failures"]


def test_a_section_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = command.PARTS["curve"]._replace(seconds=0.01)
    monkeypatch.setitem(command.PARTS, "curve", slow)
    section, failure = command.in_a_process("curve", small=True)
    assert section is None and failure == "took more than 0 s"


def test_a_report_survives_its_process() -> None:
    section = Section("decode", "title", notes=["a note"])
    section.add("case", "rate", "x", [1.0, 3.0])
    section.bars.append(Bar("bar", 5.0, "%", 7.0, at_least=False))
    assert command.section_of("decode", json.loads(json.dumps(section.to_json()))) == section


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.run([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
