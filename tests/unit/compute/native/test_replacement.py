"""Our modules in place of a model's own, where projections round what they are given to 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.compute.attention import CpuAttention
from engine.compute.loading.loader import LoadedModel
from engine.compute.native.closeness import is_close
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.modules import NativeLinear
from engine.compute.native.observation import Observation, observe
from engine.compute.native.places import Place
from engine.compute.native.quantization import Q8_0
from engine.compute.native.replacement import make_equal, names_to_observe
from tests.support.native import FLOAT32_FORM, compiled_kernels
from tests.support.packed import as_loaded
from tests.support.speculated import single_threaded
from tests.support.tiny_models import tiny_model

PLACES = {
    "o_proj": Place("model.layers.1.self_attn", Place.ATTENTION),
    "down_proj": Place("model.layers.1.mlp", Place.MLP),
}


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with single_threaded(), torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return compiled_kernels(torch.float32, FLOAT32_FORM, formats=True)


@pytest.fixture(scope="module")
def loaded(kernels: NativeKernels) -> LoadedModel:
    """A model whose layers' weights have 8 bits."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    for name, linear in list(model.base_model.named_modules()):
        if isinstance(linear, nn.Linear):
            weights = kernels.quantize(kernels.pack(linear.weight), Q8_0)
            model.base_model.set_submodule(name, NativeLinear.of(kernels, weights))
    return as_loaded(model)


def told(
    observation: Observation, place: Place, last: str, given: torch.Tensor, output: torch.Tensor
) -> Observation:
    """The same with another input of the projection `last`, and another output of the module in `place`."""
    whole, part = observation.seen[place.name], observation.seen[last]
    changed = {
        last: replace(part, args=(given,)),
        place.name: replace(whole, output=(output,) if isinstance(whole.output, tuple) else output),
    }
    return replace(observation, seen=observation.seen | changed)


@pytest.mark.parametrize("name", PLACES)
def test_no_module_stays_for_differences_that_rounding_makes_steps_of(
    name: str, loaded: LoadedModel, kernels: NativeKernels
) -> None:
    place, last = PLACES[name], f"{PLACES[name].name}.{name}"
    original, projection = map(loaded.model.get_submodule, (place.name, last))
    observation = observe(loaded, list(names_to_observe(loaded.model, [place])))
    given = observation.seen[last].given
    assert given is not None

    def is_replaced(given: torch.Tensor, output: torch.Tensor) -> bool:
        seen = told(observation, place, last, given, output)
        return make_equal(original, place, seen, seen.context(CpuAttention(kernels)), kernels) is not None

    noise = torch.randn(given.shape, generator=torch.Generator().manual_seed(0))
    close = given * (1 + 5e-5 * noise)
    exact, stepped = projection(given), projection(close)
    assert is_close(close, given) and not is_close(stepped, exact)
    assert is_replaced(given, exact) and is_replaced(close, stepped)
    assert not is_replaced(1.01 * given, projection(1.01 * given)), "another input of the projection"
    assert not is_replaced(given, 1.01 * exact), "more behind the projection"
