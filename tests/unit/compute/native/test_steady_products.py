"""Routers and narrow linears of torch's multiply by blocks: a row has its bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUActivation, SiLUActivation
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from engine.compute.native.steady_products import block_product, keep_rows

WIDTH, EXPERTS = 1024, 64  # rows so long that a product among many rounds otherwise than alone
# With a row of a bias for those whose blocks give them one.
ROUTERS = ((DeepseekV3TopkRouter, 0), (Lfm2MoeTopKRouter, 1), (MiniMaxM2TopKRouter, 1))


def router(kind: Any) -> Any:
    config = SimpleNamespace(
        num_experts_per_tok=2,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        hidden_size=WIDTH,
        routed_scaling_factor=1.5,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        use_expert_bias=True,
    )
    torch.manual_seed(0)
    made: Any = kind(config)
    nn.init.normal_(made.weight)
    return made.requires_grad_(False).eval()


@pytest.mark.parametrize("num_rows", [0, 1, 8, 21])
@pytest.mark.parametrize(("kind", "biases"), ROUTERS)
def test_outputs_are_the_routers_own(kind: Any, biases: int, num_rows: int) -> None:
    plain, kept = router(kind), router(kind)
    assert keep_rows(nn.Sequential(kept, nn.Dropout())) == 1
    given = torch.randn(num_rows, WIDTH), *[torch.randn(EXPERTS)] * biases
    for ours, theirs in zip(kept(*given), plain(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "biases"), ROUTERS)
def test_a_row_has_the_same_bits_in_any_company(kind: Any, biases: int, dtype: torch.dtype) -> None:
    kept = router(kind).to(dtype)
    keep_rows(nn.Sequential(kept))
    rows, bias = torch.randn(40, WIDTH, dtype=dtype), [torch.randn(EXPERTS)] * biases
    together = kept(rows, *bias)
    for row in range(40):
        for place, length in ((row, 1), (max(0, row - 2), 5)):
            some = kept(rows[place : place + length], *bias)
            assert all(
                torch.equal(part[row - place], whole[row]) for part, whole in zip(some, together, strict=True)
            )


class MLP(nn.Module):
    """As some of transformers are."""

    __module__ = "transformers.models.any.modeling_any"

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * torch.sigmoid(gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "made",
    [Zamba2RMSNormGated(46, group_size=23), MLP(), GELUActivation(), SiLUActivation()],
    ids=lambda made: type(made).__name__,
)
def test_so_has_one_behind_a_gated_norm_or_an_activation(made: nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = deepcopy(made).to(dtype).requires_grad_(False)
    ours = deepcopy(plain)
    assert keep_rows(nn.ModuleList([ours])) == 0
    rows, gates = torch.randn(40, 46, dtype=dtype), torch.randn(40, 92, dtype=dtype)
    apart = gates.chunk(2, dim=-1)[0]
    for gate in (apart, apart.contiguous()):
        given = (rows, gate) if isinstance(made, Zamba2RMSNormGated) else (gate,)
        together = ours(*given)
        torch.testing.assert_close(together, plain(*given))
        for row in range(40):
            assert torch.equal(ours(*(each[row : row + 1] for each in given))[0], together[row])


class OfMany(nn.Linear):
    """Rounds a row among many otherwise than alone, on any machine."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (1 + 1e-2 * (len(rows) > 2))


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_that_rounds_a_row_by_its_company_is_kept_from_it(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    narrow = OfMany(WIDTH, 16, bias=bias).requires_grad_(False)
    plain, rows = nn.Linear(WIDTH, 16, bias=bias), torch.randn(9, WIDTH)
    plain.load_state_dict(narrow.state_dict())
    monkeypatch.setattr(nn, "Linear", OfMany)
    assert keep_rows(nn.Sequential(narrow)) == 1
    torch.testing.assert_close(narrow(rows), plain(rows))
    assert torch.equal(narrow(rows[3:4]), narrow(rows)[3:4])


class OfEach(nn.Linear):
    """Rounds a row alike in any company, on any machine."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(OfEach, self).forward(row[None])[0] for row in rows])


def test_a_linear_that_is_wide_or_steady_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "Linear", OfEach)
    assert keep_rows(nn.Sequential(OfEach(2, 1))) == 0
    monkeypatch.setattr(nn, "Linear", OfMany)
    assert keep_rows(nn.Sequential(OfMany(1024, 513))) == 0


class Gated(nn.Module):
    """As attention and mixtures of transformers are, with a gate for each row or head."""

    def __init__(self, gates: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.g_proj = nn.Linear(48, gates)
        self.function = function

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gates = self.function(self.g_proj(rows).float()).to(rows.dtype)
        return (rows[:, None] * gates[:, :, None]).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.sigmoid, torch.Tensor.sigmoid, F.softplus])
@pytest.mark.parametrize("gates", [1, 6])
def test_so_has_one_behind_gates(
    gates: int, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = Gated(gates, function).to(dtype).requires_grad_(False)
    ours, rows = deepcopy(plain), torch.randn(40, 48, dtype=dtype)
    keep_rows(ours)
    together = ours(rows)
    assert type(together) is torch.Tensor
    torch.testing.assert_close(together, plain(rows))
    assert all(torch.equal(ours(rows[row : row + 1])[0], together[row]) for row in range(40))


@pytest.mark.parametrize("outputs", [1, 2, 16])
def test_a_product_of_few_outputs_gives_a_row_its_bits(outputs: int) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(40, 2048), torch.randn(outputs, 2048)
    whole = block_product(rows, weight)
    for first, stop in ((0, 1), (7, 9), (30, 40)):
        assert torch.equal(block_product(rows[first:stop], weight), whole[first:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((2, 11, 48), (5, 48), (5,)))
    torch.testing.assert_close(block_product(rows, weight), F.linear(rows, weight))
    torch.testing.assert_close(block_product(rows, weight, bias), F.linear(rows, weight, bias))
