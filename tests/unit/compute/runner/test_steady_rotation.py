"""Rotary embeddings that choose frequencies by the longest position, held to the ones they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.steady_rotation import keep_rotation
from tests.support.packed import as_loaded
from tests.support.tiny_models import tiny_config, tiny_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
SWITCH = 64


def longrope(family: str) -> dict[str, Any]:
    config = tiny_config(family)
    half = config.hidden_size // config.num_attention_heads // 2
    return {
        **config.rope_parameters,
        "rope_type": "longrope",
        "short_factor": [1.5] * half,
        "long_factor": [2.0] * half,
        "original_max_position_embeddings": SWITCH,
    }


def load(rope: dict[str, Any], max_model_len: int) -> LoadedModel:
    return replace(as_loaded(tiny_model("llama", rope_parameters=rope)), max_model_len=max_model_len)


class NeverRead(torch.Tensor):
    """Positions whose values the host may not ask for."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is not torch.max and func is not torch.Tensor.__bool__, "the host would wait"
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("rope", "longest"), [(DYNAMIC, 256), (longrope("llama"), SWITCH)], ids=["dynamic", "longrope"]
)
def test_angles_are_the_same_and_no_position_is_asked_for(rope: dict[str, Any], longest: int) -> None:
    loaded = load(rope, longest)
    rotary, like = loaded.model.base_model.rotary_emb, torch.zeros(1)
    positions = torch.tensor([[0, 5, longest - 1]])
    expected = rotary(like, positions)
    with pytest.raises(AssertionError, match="wait"):
        rotary(like, positions.as_subclass(NeverRead))
    for _ in range(2):  # the second time changes nothing
        keep_rotation(loaded)
        found = rotary(like, positions.as_subclass(NeverRead))
        assert all(map(torch.equal, found, expected))


def test_a_model_that_may_pass_the_switch_keeps_its_own() -> None:
    loaded = load(longrope("llama"), SWITCH + 1)
    keep_rotation(loaded)
    assert "forward" not in vars(loaded.model.base_model.rotary_emb)


def test_frequencies_that_nothing_changes_are_left_alone() -> None:
    loaded = as_loaded(tiny_model("llama"))
    keep_rotation(loaded)
    assert "forward" not in vars(loaded.model.base_model.rotary_emb)
