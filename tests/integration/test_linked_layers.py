"""Fused layers that norm their answer for the next one, in Triton's interpreter; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.attention import CONTEXT_KEYWORD
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.observation import observe
from engine.compute.runner import packed_forward
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import packed_sample
from tests.support.packed import as_loaded
from tests.support.tiny_models import GEMMA4_EXPERTS, tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import layer_links  # noqa: E402
from engine.compute.cuda.fused_layer import FusedLayer  # noqa: E402
from engine.compute.cuda.fused_model import fuse_layers  # noqa: E402
from engine.compute.cuda.fused_norms import Sum  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import WITH_GATES  # noqa: E402

pytestmark = WITH_GATES

# Whether a layer ends in a sum that is normed next, or in a product that adds, or nothing is normed next.
FAMILIES = {"glm4": True, "gemma3": True, "gemma4": True, "mixtral": True, "llama": False, "olmo2": False}
CHANGES: dict[str, dict[str, Any]] = {"gemma4": GEMMA4_EXPERTS}
BLOCK_SIZE = 4


def backend() -> TritonAttention:
    return TritonAttention(Gpu(4, 200_000))


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_forward, "choose_backend", lambda *_, **__: backend())


def fused(family: str) -> tuple[LoadedModel, list[Any]]:
    """A model, and its layers, all fused."""
    loaded = as_loaded(tiny_model(family, **CHANGES.get(family, {})))
    assert fuse_layers(loaded, backend(), BLOCK_SIZE) == len(loaded.layers)
    return loaded, list(loaded.model.base_model.layers)


@pytest.mark.parametrize(("family", "is_linked"), FAMILIES.items())
def test_a_layer_norms_its_sum_for_the_next_and_no_number_changes(
    family: str, is_linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, layers = fused(family)
    links = [layer.next_norm for layer in layers]
    assert links == (
        [layer.input_norm for layer in layers[1:]] if is_linked else [None] * len(layers[1:])
    ) + [None]
    normed: list[Any] = []
    right = FusedLayer.given_to_attention

    def noted(self: FusedLayer, rows: torch.Tensor) -> torch.Tensor:
        normed.append(self)
        return right(self, rows)

    monkeypatch.setattr(FusedLayer, "given_to_attention", noted)
    found = packed_sample(PackedForward(loaded))
    assert [layer in normed for layer in layers] == [True] + [not is_linked] * len(layers[1:])
    for layer in layers:
        layer.next_norm = None
    assert torch.equal(packed_sample(PackedForward(loaded)), found)


def test_a_norm_that_answers_otherwise_in_one_launch_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Sum.computed

    def other(self: Sum, by: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        total, normed = right(self, by)
        return total, None if normed is None else 1.1 * normed

    monkeypatch.setattr(Sum, "computed", other)
    _, layers = fused("glm4")
    assert all(layer.next_norm is None for layer in layers)


def test_a_layer_whose_answer_the_next_is_not_given_norms_nothing_for_it() -> None:
    loaded = as_loaded(tiny_model("glm4"))
    names = [name for name, part in loaded.model.named_modules() if FusedLayer.fits(part, loaded.dtype)]
    seen = observe(loaded, [*names, *(f"{name}.mlp" for name in names)], BLOCK_SIZE).seen
    _, layers = fused("glm4")
    for layer in layers:
        layer.next_norm = None
    between = replace(seen[names[1]], args=(seen[names[1]].args[0].clone(),))
    layer_links.link(dict(zip(names, layers, strict=True)), seen | {names[1]: between})
    assert layers[0].next_norm is None
    layer_links.link(dict(zip(names, layers, strict=True)), seen)
    assert layers[0].next_norm is layers[1].input_norm


def test_a_layer_takes_what_was_normed_for_it_from_the_very_rows_alone() -> None:
    loaded, layers = fused("glm4")
    observation = observe(loaded, [f"model.layers.{place}" for place in range(2)], BLOCK_SIZE)
    seen = observation.seen["model.layers.1"]
    context = observation.context(backend())
    options = seen.options | {CONTEXT_KEYWORD: context}
    rows, expected = seen.args[0], seen.output
    wrong = torch.zeros_like(rows[0])

    def answer(given: torch.Tensor) -> torch.Tensor:
        answered: torch.Tensor = layers[1](given, **options)
        return answered

    context.hand_on(rows, layers[1].input_norm, wrong)
    assert not torch.equal(answer(rows), expected)
    assert torch.equal(answer(rows), expected)  # what is handed on is taken once
    context.hand_on(rows, layers[1].input_norm, wrong)
    assert torch.equal(answer(rows.clone()), expected)
    context.hand_on(rows, layers[0].input_norm, wrong)
    assert torch.equal(answer(rows), expected)
