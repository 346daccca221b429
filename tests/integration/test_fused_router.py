"""Fused routers on the CPU, through Triton's interpreter, against transformers' own; `make test-triton`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.compute.native.families import (
    GROUPED_ROUTERS,
    ROUTERS,
    ROUTERS_IN_FLOATS,
    ROUTERS_TELLING_FLOATS,
)
from engine.compute.native.observation import Seen
from engine.compute.native.records import NormKind
from engine.compute.runner.scratch_pass import forward_of
from engine.compute.runner.self_check import packed_sample
from tests.support.launches import CountedKernel, LaunchCount, run_counted
from tests.support.packed import as_loaded
from tests.support.recurrent_classes import loaded_from, model_of
from tests.support.routers import BY_GROUPS, PLAIN, router_of
from tests.support.tiny_models import GEMMA4_EXPERTS, tiny_model

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from engine.compute.cuda import fused_router  # noqa: E402
from engine.compute.cuda.expert_layout import Choice  # noqa: E402
from engine.compute.cuda.fused_model import fuse_routers  # noqa: E402
from engine.compute.cuda.fused_norms import FusedNorm, Sum, norm, sum_and_norm  # noqa: E402
from engine.compute.cuda.fused_router import (  # noqa: E402
    FusedRouter,
    FusedScaledRouter,
    choose,
    equal_router,
)
from tests.support.interpreter import WITH_GATES, with_all_numbers  # noqa: E402

pytestmark = WITH_GATES

HIDDEN = 64
GROUPED = Choice(48, 5, by_sigmoid=True, num_groups=6, kept_groups=2, least=1e-20, factor=2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*PLAIN, *BY_GROUPS])
def test_experts_and_shares_are_the_routers_own(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_all_numbers(monkeypatch)
    router = router_of(family, HIDDEN, dtype)
    assert FusedRouter.fits(router, dtype)
    rows = torch.randn(40, HIDDEN).to(dtype)
    logits, shares, chosen = FusedRouter(router)(rows)
    expected_logits, expected_shares, expected = router(rows)
    assert torch.equal(logits.float(), expected_logits.float()) and chosen.dtype is expected.dtype
    assert shares.dtype is expected_shares.dtype
    order, expected_order = chosen.argsort(1), expected.argsort(1)
    if dtype is torch.float32:  # two logits of bfloat16 may be equal, and either chosen
        assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
        torch.testing.assert_close(shares.gather(1, order), expected_shares.gather(1, expected_order))
    assert equal_router(router, Seen((rows,), {}, router(rows)), dtype) is not None


@pytest.mark.parametrize(
    "family", sorted(ROUTERS | ROUTERS_TELLING_FLOATS | ROUTERS_IN_FLOATS | GROUPED_ROUTERS)
)
def test_every_router_that_was_read_is_tried(family: str) -> None:
    assert family in PLAIN or family in BY_GROUPS


@pytest.mark.parametrize("choice", [Choice(33, 4), Choice(512, 10), Choice(3, 3), GROUPED])
def test_the_likeliest_come_first_and_of_equal_ones_the_first(choice: Choice) -> None:
    logits = torch.randn(9, choice.count).round(decimals=1)  # many are equal
    shares, chosen = choose(logits, choice, torch.float32)
    if choice.num_groups == 1:
        expected = logits.sort(stable=True, dim=1, descending=True).indices[:, : choice.each]
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(shares, logits.gather(1, chosen).softmax(1))
    assert all(len(set(row)) == choice.each for row in chosen.tolist())
    picked = logits.gather(1, chosen)
    assert torch.equal(picked, picked.sort(1, descending=True).values)
    total = choice.factor if choice.is_normed else 1.0
    torch.testing.assert_close(shares.sum(1), torch.full((9,), total))


def test_biases_count_for_who_is_chosen_and_scales_for_shares() -> None:
    choice = Choice(6, 2, is_normed=False, by_sigmoid=True)
    logits, biases, scales = torch.zeros(1, 6), torch.zeros(6), torch.arange(6.0)
    biases[4], biases[2] = 2.0, 1.0
    shares, chosen = choose(logits, choice, torch.float32, biases, scales)
    assert chosen.tolist() == [[4, 2]]
    torch.testing.assert_close(shares, torch.tensor([[0.5 * 4, 0.5 * 2]]))


@pytest.mark.parametrize("scales", [None, torch.rand(48)])
def test_experts_that_all_rows_go_through_come_last_with_shares_of_one(scales: torch.Tensor | None) -> None:
    logits = torch.randn(9, 48)
    expected = choose(logits, GROUPED, torch.float32, scales=scales)
    shares, chosen = choose(logits, replace(GROUPED, num_shared=2), torch.float32, scales=scales)
    assert torch.equal(shares[:, :5], expected[0]) and torch.equal(chosen[:, :5], expected[1])
    assert (shares[:, 5:] == 1).all() and torch.equal(chosen[:, 5:], torch.tensor([48, 49]).expand(9, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_normed_for_all_who_read_it_as_for_each(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What chooses experts to the last bit: others would be chosen."""
    with_all_numbers(monkeypatch)
    model = tiny_model("gemma4", dtype=dtype, **GEMMA4_EXPERTS)
    original: Any = next(each for each in model.modules() if FusedScaledRouter.fits(each, dtype))
    torch.nn.init.uniform_(original.scale)
    router, width = FusedScaledRouter(original), len(original.scale)
    norms = [torch.nn.RMSNorm(width, 10.0**-power, dtype=dtype) for power in (4, 5, 6)]
    for each in norms:
        torch.nn.init.normal_(each.weight)
    of_added, by, other = (FusedNorm(each, NormKind.ROUNDED) for each in norms)
    of = Sum(torch.randn(5, width).to(dtype), torch.randn(5, width).to(dtype), of_added, 0.7)
    total, normed, other_normed, scaled = router.sum_and_scaled(of, by, other)
    expected, expected_normed = sum_and_norm(of, by)
    assert torch.equal(total, expected) and torch.equal(normed, expected_normed)
    assert torch.equal(other_normed, norm(total, other)) and torch.equal(scaled, router.scaled(total))


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """The best expert of all stands alone in its group, and two others have more together."""
    choice = Choice(8, 2, by_sigmoid=True, num_groups=4, kept_groups=1)
    logits = torch.full((1, 8), -9.0)
    logits[0, 1], logits[0, 4], logits[0, 5] = 3.0, 1.0, 2.0
    assert choose(logits, choice, torch.float32)[1].tolist() == [[5, 4]]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("choice", [Choice(12, 3), Choice(12, 3, is_normed=False), GROUPED])
def test_a_number_that_is_not_finite_harms_its_row_alone(choice: Choice, number: float) -> None:
    logits = torch.randn(3, choice.count)
    expected = choose(logits, choice, torch.float32)
    logits[1, 7] = number
    shares, chosen = choose(logits, choice, torch.float32)
    assert ((chosen >= 0) & (chosen < choice.count)).all()
    for row in (0, 2):
        assert torch.equal(shares[row], expected[0][row]) and torch.equal(chosen[row], expected[1][row])
    shows = number != number or (number > 0 and not choice.by_sigmoid)
    assert bool(shares[1].isnan().any()) == shows
    if shows or number < 0:
        assert (7 in chosen[1]) == shows


def test_a_row_has_the_same_bits_in_any_company() -> None:
    logits = torch.randn(17, 128)
    shares, chosen = choose(logits, Choice(128, 8), torch.float32)
    for row in (0, 8, 16):
        alone = choose(logits[row : row + 1], Choice(128, 8), torch.float32)
        assert torch.equal(alone[0][0], shares[row]) and torch.equal(alone[1][0], chosen[row])


@pytest.mark.parametrize(("family", "launches"), [("qwen3_moe", 2), ("deepseek_v3", 3)])
def test_a_call_is_two_launches_or_three_and_waits_for_nothing(
    family: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = router_of(family, HIDDEN, torch.bfloat16)
    made, count = FusedRouter(router), LaunchCount()
    monkeypatch.setattr(fused_router, "choose_kernel", CountedKernel("choose_kernel", count))
    rows = torch.randn(20, HIDDEN, dtype=torch.bfloat16)
    before = run_counted(count, lambda: router(rows))
    ours = run_counted(count, lambda: made(rows))
    assert len(ours) == launches and ours[-1] == "choose_kernel", ours
    assert len(before) >= {"qwen3_moe": 6, "deepseek_v3": 17}[family], before


@pytest.mark.parametrize(
    "name", ["DeepseekV3", "Glm4MoeLite", "KimiLinear", "NemotronH", "Qwen3Moe", "GptOss"]
)
def test_a_model_of_fused_routers_is_the_model(name: str) -> None:
    loaded = loaded_from(model_of(name))
    before = packed_sample(forward_of(loaded))
    routers = [each for each in loaded.model.modules() if FusedRouter.fits(each, loaded.dtype)]
    assert routers and fuse_routers(loaded, 4) == len(routers)
    assert sum(isinstance(module, FusedRouter) for module in loaded.model.modules()) == len(routers)
    torch.testing.assert_close(packed_sample(forward_of(loaded)), before, atol=1e-5, rtol=1e-5)


def test_a_router_that_chooses_otherwise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = choose(logits, *rest)
        return shares, (chosen + 1) % logits.shape[1]

    loaded = as_loaded(tiny_model("mixtral"))
    monkeypatch.setattr(fused_router, "choose", other)
    assert fuse_routers(loaded, 4) == 0
    assert not any(isinstance(module, FusedRouter) for module in loaded.model.modules())


def test_a_router_that_chooses_by_other_groups_is_not_fused() -> None:
    router = router_of("deepseek_v2", HIDDEN, torch.float32)
    assert FusedRouter.fits(router, torch.float32)
    router.topk_method = "group_limited_greedy"
    assert not FusedRouter.fits(router, torch.float32)


def test_a_router_that_does_more_than_its_class_says_is_not_fused() -> None:
    router = router_of("qwen3_moe", HIDDEN, torch.float32)
    assert not FusedRouter.fits(router, torch.bfloat16)
    router.register_forward_hook(lambda *_: None)
    assert not FusedRouter.fits(router, torch.float32)
