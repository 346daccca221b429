"""Which draws a device gets: Triton's where they draw the same tokens, torch's operations elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from engine.compute.cuda import draw_choice
from engine.compute.cuda.device_draw import TORCH_DRAWS, draw_filtered, draw_plain
from engine.compute.cuda.draw_choice import check_filtered_draw, choose_draws
from engine.compute.sampling.processors import Filters
from tests.support.sampling_reference import CPU

Change = Callable[[Filters], Filters]
MISTAKES: dict[str, Change] = {
    "one token more of top-k": lambda filters: replace(filters, top_k=filters.top_k + 1),
    "no top-k": lambda filters: replace(filters, top_k=filters.top_k + torch.inf),
    "a larger share": lambda filters: replace(filters, top_p=filters.top_p * 1.1),
    "no top-p": lambda filters: replace(filters, top_p=filters.top_p + torch.inf),
    "no min-p": lambda filters: replace(filters, log_min_p=filters.log_min_p - torch.inf),
}


def test_the_sort_passes_its_own_check() -> None:
    check_filtered_draw(draw_filtered, CPU)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_draw_from_other_tokens_does_not_pass(mistake: str) -> None:
    def draw(
        logits: torch.Tensor, places: torch.Tensor, filters: Filters, keys: torch.Tensor
    ) -> torch.Tensor:
        return draw_filtered(logits, places, MISTAKES[mistake](filters), keys)

    with pytest.raises(RuntimeError, match="other tokens"):
        check_filtered_draw(draw, CPU)


def test_a_draw_that_keeps_the_last_of_equal_tokens_does_not_pass() -> None:
    def draw(
        logits: torch.Tensor, places: torch.Tensor, filters: Filters, keys: torch.Tensor
    ) -> torch.Tensor:
        drawn = draw_filtered(logits.flip(1), places, filters, keys)
        return torch.where(drawn < 0, drawn, logits.shape[1] - 1 - drawn)

    with pytest.raises(RuntimeError, match="other tokens"):
        check_filtered_draw(draw, CPU)


def test_a_device_without_triton_has_torchs_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_draws(CPU) is TORCH_DRAWS
    monkeypatch.setattr(draw_choice, "find_spec", lambda name: None)
    assert choose_draws(torch.device("cuda")) is TORCH_DRAWS


@pytest.mark.parametrize("failing", ["plain", "filtered", None])
def test_a_draw_that_does_not_work_is_told_and_the_other_used(
    failing: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fast = {"plain": lambda *asked: draw_plain(*asked), "filtered": lambda *asked: draw_filtered(*asked)}
    for kind, name in (("plain", "triton_draw"), ("filtered", "triton_filter")):
        module = ModuleType(name)
        setattr(module, f"draw_{kind}_at_once", fast[kind])
        monkeypatch.setitem(sys.modules, f"engine.compute.cuda.{name}", module)

    def check(kind: str) -> None:
        if kind == failing:
            raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(draw_choice, "find_spec", lambda name: object())
    monkeypatch.setattr(draw_choice, "check_draw", lambda draw, device: check("plain"))
    monkeypatch.setattr(draw_choice, "check_filtered_draw", lambda draw, device: check("filtered"))
    with caplog.at_level(logging.WARNING):
        draws = choose_draws(torch.device("cuda", 0))
    slow = TORCH_DRAWS._asdict()
    assert draws._asdict() == {kind: slow[kind] if kind == failing else fast[kind] for kind in fast}
    told = [record.getMessage() for record in caplog.records]
    how = {
        "plain": "are drawn on cuda:0 by many operations",
        "filtered": "filter are drawn on cuda:0 by sorting",
    }
    assert len(told) == (failing is not None)
    assert all(one.endswith(f"{how[str(failing)]}: no such") for one in told)
