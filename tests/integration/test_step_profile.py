"""What is measured before the first request: real steps of the sizes that fit, and what it is good for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from engine.compute.runner import step_profile
from engine.compute.runner.step_profile import ProfileLimits, StepProfile, profile_steps
from engine.plan.step_records import SampledRows, StepInputs, StepResult
from engine.startup.build import seed_costs
from tests.integration.test_model_runner import BLOCK_SIZE, make_runner
from tests.support.factories import make_batcher


def sizes_of(limits: ProfileLimits) -> list[tuple[int, int]]:
    """The (sequences, tokens) measured of a runner that takes no time."""
    profile = profile_steps(lambda _: StepResult(SampledRows([]), 0.0, 0.0), limits)
    return [(num_seqs, num_tokens) for num_seqs, num_tokens, _ in profile.decodes]


def test_a_model_s_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "_TIME_LIMIT_S", math.inf)  # however busy this machine is
    runner = make_runner("llama")
    seen: list[StepInputs] = []

    def run(inputs: StepInputs) -> StepResult:
        seen.append(inputs)
        return runner.run(inputs)

    profile = profile_steps(run, ProfileLimits(32, BLOCK_SIZE, 40, max_num_seqs=2, max_draft_tokens=8))
    assert [entry[:2] for entry in profile.decodes] == [(1, 1), (2, 2), (1, 5), (1, 9), (2, 10)]
    assert profile.chunk is not None
    assert profile.chunk[0] == 40
    assert all(seconds > 0 for *_, seconds in (*profile.decodes, profile.chunk))
    assert all(tensor.isfinite().all() for tensor in runner.kv.tensors)
    num_drafts = [0 if step.drafts is None else int(step.drafts.num_drafts.sum()) for step in seen]
    assert sorted(set(num_drafts)) == [0, 4, 8]


def test_only_what_fits_is_measured() -> None:
    assert sizes_of(ProfileLimits(64, 16, 2048, 64, 32)) == [
        (1, 1), (8, 8), (1, 5), (1, 9), (1, 17), (1, 33), (8, 40),
    ]  # fmt: skip
    assert sizes_of(ProfileLimits(64, 16, 2048, 64)) == [(1, 1), (8, 8)], "without drafts"
    assert sizes_of(ProfileLimits(8, 16, 128, 64, 8)) == [(1, 1), (1, 5), (1, 9)], "in few blocks"
    assert sizes_of(ProfileLimits(1, 4, 4, 1, 8)) == [(1, 1)], "in a short context"


def test_a_slow_machine_s_chunk_is_measured_before_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def run(inputs: StepInputs) -> StepResult:
        now[0] += 0.2
        return StepResult(SampledRows([]), 0.2, 0.0)

    monkeypatch.setattr(step_profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    profile = profile_steps(run, ProfileLimits(64, 16, 2048, 64, 32))
    assert [entry[:2] for entry in profile.decodes] == [(1, 1), (8, 8)]
    assert profile.chunk == (64, 0.2)


def test_costs_are_known_from_what_was_measured() -> None:
    batcher = make_batcher()
    decodes = ((1, 1, 0.010), (1, 9, 0.014), (8, 8, 0.017))
    seed_costs(batcher, StepProfile(decodes, chunk=(128, 0.050)))
    assert batcher.decoder.costs.seconds(1, 9) == 0.014
    assert not batcher.decoder.costs.needs_plain(1)
    step, chunk = batcher.rates.step_s(0, 8), batcher.rates.step_s(128, 0)
    assert step is not None and abs(step - 0.017) < 0.002
    assert chunk is not None and abs(chunk - 0.050) < 0.005


def test_nothing_measured_leaves_costs_unknown() -> None:
    batcher = make_batcher()
    seed_costs(batcher, StepProfile())
    assert not batcher.rates.is_known
