"""Defaults, clamps and seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineInfo, InvalidRequest, SamplingParams
from server.api.openai.protocol import CompletionRequest
from server.api.sampling import base_seed, choice_seed, priority_of, sampling_params

INFO = EngineInfo(128, 1000, "float32", "cpu", 8, 16, 0, True)
INT64 = st.integers(-(2**63), 2**63 - 1)


def params(**fields: Any) -> SamplingParams:
    return sampling_params(CompletionRequest(prompt="a", **fields), INFO, max_tokens=16)  # type: ignore[arg-type]


def test_nothing_asked_for_is_plain_sampling() -> None:
    assert params() == SamplingParams(max_tokens=16)


def test_what_is_not_asked_for_is_as_the_models_makers_advise() -> None:
    advice = {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0, "min_p": 0.1, "repetition_penalty": 1.1}
    info = replace(INFO, default_sampling=advice)

    def of(**fields: Any) -> SamplingParams:
        return sampling_params(CompletionRequest(prompt="a", **fields), info, max_tokens=16)  # type: ignore[arg-type]

    assert of() == SamplingParams(
        max_tokens=16, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1
    )
    asked = of(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    assert asked == SamplingParams(max_tokens=16)
    assert of(temperature=None).temperature == 0.6


@pytest.mark.parametrize(("asked", "given_on"), [(0, 0.0), (1e-30, 0.0), (1e-6, 0.0), (0.01, 0.01), (2, 2.0)])
def test_a_temperature_too_small_to_divide_by_is_greedy(asked: float, given_on: float) -> None:
    assert params(temperature=asked).temperature == given_on


@pytest.mark.parametrize(("asked", "given_on"), [(-1, 0), (0, 0), (5, 5), (10**9, 1000)])
def test_top_k_is_off_or_within_the_vocabulary(asked: int, given_on: int) -> None:
    assert params(top_k=asked).top_k == given_on


def test_ids_outside_the_vocabulary_are_refused_by_name() -> None:
    for name, value in (
        ("stop_token_ids", [1000]),
        ("allowed_token_ids", [5, 1000]),
        ("logit_bias", {"1000": 1}),
    ):
        with pytest.raises(InvalidRequest, match="999") as refused:
            params(**{name: value})
        assert refused.value.param == name
        params(**{name: {"999": 1} if name == "logit_bias" else [999]})


@given(seed=INT64, j=st.integers(0, 200))
def test_choice_seeds_are_int64_and_repeat(seed: int, j: int) -> None:
    derived = choice_seed(seed, j)
    assert -(2**63) <= derived < 2**63
    assert derived == choice_seed(seed, j)


@given(seed=INT64)
def test_choices_do_not_share_seeds(seed: int) -> None:
    assert len({choice_seed(seed, j) for j in range(128)}) == 128
    assert choice_seed(seed, 1) != choice_seed(seed ^ 1, 1)


def test_the_derivation_is_frozen() -> None:
    assert [choice_seed(42, j) for j in range(3)] == [42, -225867498704701796, -3975726013218598159]


def test_a_seed_is_drawn_when_none_is_given() -> None:
    body = CompletionRequest(prompt="a")  # type: ignore[arg-type]
    assert len({base_seed(body) for _ in range(10)}) == 10


def test_an_explicit_priority_wins_over_the_tier() -> None:
    body = CompletionRequest(prompt="a", priority=3, service_tier="priority")  # type: ignore[arg-type]
    assert priority_of(body) == 3
