"""Fused experts on the CPU, through Triton's interpreter, against transformers' own; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from engine.compute.native.closeness import is_close
from engine.compute.native.families import has_read_experts
from engine.compute.native.observation import observe
from engine.compute.native.records import Activation, NormKind
from engine.compute.recurrent import recurrent_forward
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_sample
from tests.support.expert_mixtures import Mixture, random_rows
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.packed import as_loaded
from tests.support.tiny_models import GEMMA4_EXPERTS, NEMOTRON_EXPERTS, tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import fused_experts  # noqa: E402
from engine.compute.cuda.expert_layout import (  # noqa: E402
    FEW_ROWS,
    MOST_FOUND,
    ExpertShape,
    layout_for,
    rows_of_each_layout,
)
from engine.compute.cuda.fused_experts import FusedExperts, equal_experts, route, summed  # noqa: E402
from engine.compute.cuda.fused_layer import FusedLayer  # noqa: E402
from engine.compute.cuda.fused_mlp import CalledMixture, JoinedMlp, RoutedMixture  # noqa: E402
from engine.compute.cuda.fused_model import (  # noqa: E402
    fuse_experts,
    fuse_layers,
    with_fused_layers,
)
from engine.compute.cuda.fused_norms import Beside, FusedNorm, Sum  # noqa: E402
from engine.compute.cuda.state_scans import TritonScans  # noqa: E402
from engine.compute.cuda.triton_attention import Gpu, TritonAttention  # noqa: E402
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

# Each with the layers that have experts, and those of all that are fused.
FAMILIES = {
    "mixtral": (2, 2),
    "olmoe": (2, 2),
    "qwen2_moe": (2, 2),
    "qwen3_moe": (1, 2),
    "gpt_oss": (2, 2),
    "gemma4": (4, 4),
}
# Each with the layers that have experts, beside layers of a delta rule or Mamba, and its norms and MLPs.
HYBRIDS = {"qwen3_next_hybrid": (2, 14), "granite_hybrid_moe": (3, 9), "nemotron_h_hybrid": (2, 6)}
CHANGES: dict[str, dict[str, Any]] = {"gemma4": GEMMA4_EXPERTS, "nemotron_h_hybrid": NEMOTRON_EXPERTS}
# As transformers calls them.
CALLED = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_pytorch_tanh",
    Activation.GELU: "gelu",
    Activation.RELU_SQUARED: "relu2",
}
EACH = 3
COUNTS = [1, 5, 40, 70, 200]  # the first three in the smallest tiles


def backend() -> TritonAttention:
    return TritonAttention(Gpu(4, 200_000))


def experts_of(mixture: Mixture) -> Any:
    """Transformers' own with the weights of a mixture."""
    family, first = ("qwen3_moe", "gate_up_proj") if mixture.is_gated else ("nemotron_h_hybrid", "up_proj")
    experts: Any = next(
        each for each in tiny_model(family, **CHANGES.get(family, {})).modules() if has_read_experts(each)
    )
    setattr(experts, first, nn.Parameter(mixture.gate_up, requires_grad=False))
    experts.down_proj = nn.Parameter(mixture.down, requires_grad=False)
    experts.act_fn = ACT2FN[CALLED[mixture.activation]]
    return experts


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (80, 200)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_answers_are_those_of_the_experts(is_gated: bool, hidden: int, width: int, count: int) -> None:
    mixture = Mixture.random(hidden, width, torch.float32, is_gated=is_gated)
    rows = random_rows(count, hidden, torch.float32)
    found = FusedExperts(experts_of(mixture))(*rows)
    torch.testing.assert_close(found.double(), mixture.expected(*rows), atol=1e-5, rtol=1e-5)


def test_answers_in_16_bits_are_rounded_as_those_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_numbers(monkeypatch)
    mixture = Mixture.random(64, 32, torch.bfloat16)
    rows = random_rows(20, 64, torch.bfloat16)
    assert is_close(FusedExperts(experts_of(mixture))(*rows), mixture.expected(*rows).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", CALLED)
@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_of_any_activation_are_computed(
    is_gated: bool, activation: Activation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates far to either side of 0 among them, where GELU and SiLU are 0 or the gate itself."""
    with_all_numbers(monkeypatch)
    mixture = Mixture.random(64, 32, dtype, activation, is_gated=is_gated)
    x, chosen, shares = random_rows(20, 64, dtype)
    x *= torch.logspace(-1, 3, 20)[:, None].to(dtype)
    experts = experts_of(mixture)
    assert FusedExperts.fits(experts, dtype)
    found, expected = FusedExperts(experts)(x, chosen, shares), mixture.expected(x, chosen, shares)
    if dtype is torch.float32:
        scale = expected.abs().amax(dim=1, keepdim=True)
        torch.testing.assert_close(found.double() / scale, expected / scale, atol=1e-6, rtol=0)
    assert is_close(found, expected.to(dtype))


def test_numbers_that_no_expert_has_are_left_out() -> None:
    mixture = Mixture.random(64, 32, torch.float32)
    rows, chosen, shares = random_rows(9, 64, torch.float32)
    chosen[2, 1], chosen[4], chosen[8, 0] = Mixture.COUNT, -1, 1 << 20
    shares[4] = torch.nan
    found = FusedExperts(experts_of(mixture))(rows, chosen, shares)
    expected = mixture.expected(rows, chosen, shares)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not found[4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_sums_answers_with_other_rows_does_what_a_sum_of_their_own_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, of which numbers that no expert has get none."""
    with_all_numbers(monkeypatch)
    experts = FusedExperts(experts_of(Mixture.random(80, 32, dtype)))
    given, chosen, shares = random_rows(9, 80, dtype)
    chosen[2, 1], chosen[4], chosen[8, 0] = Mixture.COUNT, -1, 1 << 20
    shares[4] = torch.nan
    answers, summed = experts.answered(given, chosen, shares), experts(given, chosen, shares)
    rows, beside = torch.randn(9, 80).to(dtype), torch.randn(9, 80).to(dtype)
    by, of_added = (
        FusedNorm(norm, NormKind.ROUNDED) for norm in (nn.RMSNorm(80, 1e-5), nn.RMSNorm(80, 1e-6))
    )
    for of in (
        Sum(rows, summed, multiplier=0.7),
        Sum(rows, summed, of_added),
        Sum(rows, summed, of_added, factor=0.9, beside=Beside(beside, by, of_added)),
    ):
        for next_norm in (None, by):
            expected, found = (each.computed(next_norm) for each in (of, of._replace(added=answers)))
            for found_one, expected_one in zip(found, expected, strict=True):
                if expected_one is None:
                    assert next_norm is None and found_one is None
                else:
                    assert found_one is not None and torch.equal(found_one, expected_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("num_shared", [1, 3])
def test_an_mlp_is_some_more_experts_that_all_rows_go_through(
    num_shared: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be given other rows, and its answers come last."""
    with_all_numbers(monkeypatch)
    mixture, width = Mixture.random(64, 32, dtype), 32 * num_shared
    gate_up, down = nn.Linear(64, 2 * width, bias=False), nn.Linear(width, 64, bias=False)
    gate_up, down = (each.requires_grad_(False).to(dtype) for each in (gate_up, down))
    alone = FusedExperts(experts_of(mixture))
    experts = alone.with_shared(gate_up, down, Activation.SILU)
    assert experts is not None and experts.shape.num_shared == num_shared and alone.shared is None
    rows, chosen, shares = random_rows(count, 64, dtype)
    numbers = torch.arange(Mixture.COUNT, Mixture.COUNT + num_shared).expand(count, num_shared)
    others = torch.randn(count, 64).to(dtype)
    found = experts.answered(
        rows, torch.cat((chosen, numbers), 1), torch.cat((shares, torch.ones(count, num_shared)), 1), others
    )
    assert torch.equal(found.answers[:, :EACH], alone.answered(rows, chosen, shares).answers)
    gates, ups = gate_up(others).chunk(2, dim=1)
    expected = down(nn.functional.silu(gates) * ups)
    assert is_close(found.answers[:, EACH:].sum(1), expected)
    assert found.num_shared == num_shared and is_close(
        summed(found), mixture.expected(rows, chosen, shares).to(dtype) + expected
    )
    plain = nn.RMSNorm(64, 1e-5)
    by = FusedNorm(plain, NormKind.ROUNDED)
    apart = Sum(others, summed(alone.answered(rows, chosen, shares)), by, beside=Beside(expected, by, by))
    together = Sum(others, found, by, beside=Beside(None, by, by))
    assert is_close(together.computed()[0], apart.computed()[0])


def test_an_mlp_that_is_unlike_the_experts_is_none_of_them() -> None:
    experts = FusedExperts(experts_of(Mixture.random(64, 32, torch.float32)))
    gate_up, down = nn.Linear(64, 128, bias=False), nn.Linear(64, 64, bias=False)
    assert experts.with_shared(gate_up, down, Activation.SILU) is not None
    assert experts.with_shared(gate_up, down, Activation.GELU) is None
    assert experts.with_shared(nn.Linear(64, 128), down, Activation.SILU) is None
    assert experts.with_shared(nn.Linear(64, 96, bias=False), nn.Linear(48, 64), Activation.SILU) is None
    ungated = FusedExperts(experts_of(Mixture.random(64, 32, torch.float32, is_gated=False)))
    assert ungated.with_shared(gate_up, down, Activation.SILU) is None


def test_nothing_is_the_answer_to_no_rows() -> None:
    rows = random_rows(0, 64, torch.float32)
    assert FusedExperts(experts_of(Mixture.random(64, 32, torch.float32)))(*rows).shape == (0, 64)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    experts = FusedExperts(experts_of(Mixture.random(64, 32, torch.float32)))
    rows, chosen, shares = random_rows(20, 64, torch.float32)
    expected = experts(rows, chosen, shares)
    rows[3, 5] = torch.nan
    found = experts(rows, chosen, shares)
    others = torch.arange(20) != 3
    assert torch.equal(found[others], expected[others]) and found[3].isnan().all()


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_row_has_the_same_bits_in_any_company(is_gated: bool) -> None:
    """Alone, among few, among as many as are promised, at any place, beside rows of other experts."""
    experts = FusedExperts(experts_of(Mixture.random(64, 96, torch.float32, is_gated=is_gated)))
    rows = random_rows(FEW_ROWS, 64, torch.float32)
    together = experts(*rows)
    for count in (1, 2, 15, 16, 17, 33):
        assert torch.equal(experts(*(each[:count] for each in rows)), together[:count])
        assert torch.equal(experts(*(each[-count:] for each in rows)), together[-count:])
    order = torch.randperm(FEW_ROWS)
    assert torch.equal(experts(*(each[order] for each in rows)), together[order])


def crowded(kind: str, count: int) -> torch.Tensor:
    """Whom `count` rows choose."""
    generator = torch.Generator().manual_seed(count)
    if kind == "one expert":
        return torch.full((count, EACH), 4)
    if kind == "the last one":
        return torch.full((count, EACH), 5)
    if kind == "some are none's":
        return torch.randint(-1, 8, (count, EACH), generator=generator)
    return torch.randint(0, 6, (count, EACH), generator=generator)


@pytest.mark.parametrize("kind", ["any", "one expert", "the last one", "some are none's"])
@pytest.mark.parametrize("count", [1, 6, 40, 100, 300])
def test_pairs_are_sorted_by_their_experts(count: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one's stay in their order, and each is in one tile of its expert."""
    monkeypatch.setattr(fused_experts, "_SORTED", 64)
    layout = replace(layout_for(count, EACH, ExpertShape(6, 64, 32)), most_found=0)
    chosen = crowded(kind, count)
    routes = route(chosen, layout, 6)
    asked = chosen.flatten().tolist()
    expected = sorted((pair for pair, one in enumerate(asked) if 0 <= one < 6), key=asked.__getitem__)
    assert routes.order.tolist()[: len(expected)] == expected
    slots: list[int] = []
    for expert, first, last in routes.tiles.tolist():
        held = range(first, min(first + layout.rows, last))
        assert {asked[expected[slot]] for slot in held} <= {expert}
        slots += held
    assert slots == list(range(len(expected)))


@pytest.mark.parametrize("kind", ["any", "one expert", "the last one", "some are none's"])
@pytest.mark.parametrize("count", [1, 6, MOST_FOUND // EACH])
def test_few_pairs_are_found_as_many_are_sorted(
    count: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = FusedExperts(experts_of(Mixture.random(64, 32, torch.float32)))
    rows, _, shares = random_rows(count, 64, torch.float32)
    found = experts(rows, crowded(kind, count), shares)
    sorting = replace(layout_for(count, EACH, experts.shape), most_found=0)
    monkeypatch.setattr(fused_experts, "layout_for", lambda *_: sorting)
    assert torch.equal(found, experts(rows, crowded(kind, count), shares)) and found.any()


@pytest.mark.parametrize("count", [1, MOST_FOUND // EACH, MOST_FOUND // EACH + 1])
def test_a_call_is_four_launches_or_of_few_pairs_three_and_waits_for_nothing(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = FusedExperts(experts_of(Mixture.random(64, 32, torch.float32)))
    launches = LaunchCount()
    names = [name for name in vars(fused_experts) if name.endswith("_kernel")]
    for name in names:
        monkeypatch.setattr(fused_experts, name, CountedKernel(name, launches))
    monkeypatch.setattr("tests.support.launches._FREE", ("empty", "new_empty"))  # a wait is counted, too
    rows = random_rows(count, 64, torch.float32)
    ours = run_counted(launches, lambda: experts(*rows))
    route_alone = ["route_kernel"] if count * EACH > MOST_FOUND else []
    assert ours == [*route_alone, "expert_gate_kernel", "expert_down_kernel", "expert_sum_kernel"]
    assert {*ours, "route_kernel"} == set(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_fused_experts_is_the_model(family: str) -> None:
    loaded = as_loaded(tiny_model(family, **CHANGES.get(family, {})))
    before = packed_sample(PackedForward(loaded))
    num_experts, num_layers = FAMILIES[family]
    assert fuse_experts(loaded, 4) == num_experts
    assert fuse_layers(loaded, backend(), 4) == num_layers
    assert sum(isinstance(module, FusedExperts) for module in loaded.model.modules()) == num_experts
    forward = PackedForward(loaded)
    forward.backend = backend()
    torch.testing.assert_close(packed_sample(forward), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "num_experts", "num_parts"), [(name, *n) for name, n in HYBRIDS.items()])
def test_a_model_that_carries_state_keeps_its_layers_and_gets_fused_experts_and_scans(
    family: str, num_experts: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_forward, "choose_backend", lambda *_, **__: backend())
    loaded = as_loaded(tiny_model(family, **CHANGES.get(family, {})))
    before = packed_sample(forward_of(loaded))
    kinds = [type(layer) for layer in loaded.model.base_model.layers]
    fused = with_fused_layers(loaded, 4, lambda: pytest.fail("the kernels do not run"))
    assert fused.kernels_used == (
        f"for CUDA, states advanced, experts of {num_experts} fused, routers of {num_experts} fused, "
        f"norms and MLPs fused: {num_parts}"
    )
    assert type(fused.state_kernel) is TritonScans
    assert sum(isinstance(module, FusedExperts) for module in fused.model.modules()) == num_experts
    assert [type(layer) for layer in fused.model.base_model.layers] == kinds
    torch.testing.assert_close(packed_sample(forward_of(fused)), before, atol=1e-4, rtol=1e-4)


def test_states_that_kernels_advance_otherwise_are_advanced_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recurrent_forward, "choose_backend", lambda *_, **__: backend())
    for name in ("gated_delta", "delta"):
        advance = getattr(TritonScans, name)
        monkeypatch.setattr(TritonScans, name, lambda *call, advance=advance: advance(*call) * 0.9)
    loaded = as_loaded(tiny_model("qwen3_5_hybrid"))
    fused = with_fused_layers(loaded, 4, lambda: pytest.fail("the kernels run"))
    assert fused.state_kernel is None and "states are not advanced by kernels: logits differ" in caplog.text


def test_a_layer_is_fused_around_its_mixture_or_its_mlp() -> None:
    loaded = as_loaded(tiny_model("qwen3_moe"))
    fuse_experts(loaded, 4), fuse_layers(loaded, backend(), 4)
    layers: Any = loaded.model.base_model.layers
    assert [type(layer) for layer in layers] == [FusedLayer, FusedLayer]
    assert [type(layer.mlp) for layer in layers] == [RoutedMixture, JoinedMlp]
    assert type(layers[0].mlp.experts) is FusedExperts
    loaded = as_loaded(tiny_model("qwen3_moe"))
    assert fuse_layers(loaded, backend(), 4) == 2
    assert type(loaded.model.base_model.layers[0].mlp) is CalledMixture


def test_a_layer_is_fused_whose_router_chooses_by_the_last_bits() -> None:
    """What is fused rounds otherwise, and another expert answers something else altogether."""
    loaded = as_loaded(tiny_model("mixtral"))
    for name, weight in loaded.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight[:] = weight[0] + 1e-7 * torch.randn_like(weight)
    assert fuse_layers(loaded, backend(), 4) == 2


def test_weights_are_the_models_own_and_lie_there_once() -> None:
    loaded = as_loaded(tiny_model("mixtral"))
    before = {weight.data_ptr() for name, weight in loaded.model.named_parameters() if "experts" in name}
    fuse_experts(loaded, 4)
    after = {weight.data_ptr() for name, weight in loaded.model.named_parameters() if "experts" in name}
    assert before == after and len(before) == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_do_more_than_their_class_says_are_not_fused(family: str) -> None:
    experts = next(
        module for module in tiny_model(family).modules() if FusedExperts.fits(module, torch.float32)
    )
    assert not FusedExperts.fits(experts, torch.bfloat16)
    experts.register_forward_hook(lambda *_: None)
    assert not FusedExperts.fits(experts, torch.float32)


def test_experts_with_another_activation_are_not_fused() -> None:
    experts = experts_of(Mixture.random(64, 32, torch.float32))
    assert FusedExperts.fits(experts, torch.float32)
    experts.act_fn = ACT2FN["relu"]
    assert not FusedExperts.fits(experts, torch.float32)


@pytest.mark.parametrize("place", range(3))
def test_experts_that_answer_otherwise_in_any_layout_stay(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = as_loaded(tiny_model("mixtral"))
    name = next(
        name for name, module in loaded.model.named_modules() if FusedExperts.fits(module, loaded.dtype)
    )
    seen = observe(loaded, [name], 4).seen[name]
    original: Any = loaded.model.get_submodule(name)
    assert equal_experts(original, seen, loaded.dtype) is not None
    right, wrong = FusedExperts.forward, rows_of_each_layout(2, ExpertShape(4, 64, 128))[place]

    def forward(self: FusedExperts, rows: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        return right(self, rows, *chosen) * (1.01 if len(rows) == wrong else 1)

    monkeypatch.setattr(FusedExperts, "forward", forward)
    assert equal_experts(original, seen, loaded.dtype) is None
    assert fuse_experts(loaded, 4) == 0
    assert loaded.model.get_submodule(name) is original
