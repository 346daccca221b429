"""A mixture in one call: what its parts make one after the other, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engine.compute.native.experts import NativeExperts
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.mixture import NativeMixture
from engine.compute.native.modules import NativeMlp
from engine.compute.native.router import NativeRouter

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts_per_tok": 3}
BLOCKS: dict[str, Any] = {
    "mixtral": lambda: MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=5)
    ),
    "gpt_oss": lambda: GptOssMLP(
        GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=9, num_experts_per_tok=2)
    ),
    "qwen3_moe": lambda: Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**SIZES, num_experts=40)),
    "qwen2_moe": lambda: Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(**SIZES, num_experts=7, shared_expert_intermediate_size=128)
    ),
    "shared larger": lambda: Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(**SIZES, num_experts=7, shared_expert_intermediate_size=320)
    ),
}

pytestmark = pytest.mark.usefixtures("two_threads")


def block(name: str) -> Any:
    """Of weights whose products are about as large as what is multiplied."""
    torch.manual_seed(0)
    made = BLOCKS[name]()
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return made.requires_grad_(False).to(BF16).eval()


def parts_of(kernels: NativeKernels, made: Any) -> Any:
    """The block with parts of ours."""
    name = "router" if hasattr(made, "router") else "gate"
    setattr(made, name, NativeRouter(kernels, getattr(made, name)))
    made.experts = NativeExperts(kernels, made.experts)
    if hasattr(made, "shared_expert"):
        made.shared_expert = NativeMlp(kernels, made.shared_expert)
    return made


def mixed(made: Any, x: torch.Tensor) -> torch.Tensor:
    """Without the shares that gpt-oss's gives, too."""
    found = made(x)
    rows: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return rows


def noise(n: int) -> torch.Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n)).to(BF16)


@pytest.mark.parametrize("n", [1, 8, 9, 300])
@pytest.mark.parametrize("name", BLOCKS)
def test_it_makes_what_its_parts_make(kernels: NativeKernels, name: str, n: int) -> None:
    apart = parts_of(kernels, block(name))
    assert NativeMixture.fits(apart)
    x = noise(n)
    found, expected = mixed(NativeMixture(kernels, apart), x), mixed(apart, x)
    if hasattr(apart, "shared_expert"):  # whose gate torch computes in another order
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", BLOCKS)
def test_it_makes_what_the_original_makes(kernels: NativeKernels, name: str) -> None:
    x, original = noise(300), block(name)
    expected = mixed(original, x)
    found = mixed(NativeMixture(kernels, parts_of(kernels, original)), x)
    distances = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert distances.quantile(0.9) < 0.02  # but where two experts are as likely within rounding


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_a_row_is_the_same_bits_in_any_company(kernels: NativeKernels, name: str) -> None:
    made = NativeMixture(kernels, parts_of(kernels, block(name)))
    x = noise(200)
    together = made(x)
    for n in (1, 2, 8, 9, 97):
        apart = [made(x[:, first : first + n]) for first in range(0, 200, n)]
        assert torch.equal(torch.cat(apart, dim=1), together)


def test_of_experts_as_likely_the_first_are_chosen(kernels: NativeKernels) -> None:
    made = block("qwen3_moe")
    made.gate.weight.data[:] = made.gate.weight.data[0]
    _, shares, chosen = NativeRouter(kernels, made.gate)(noise(20)[0])
    assert chosen.tolist() == [[0, 1, 2]] * 20
    torch.testing.assert_close(shares.float(), torch.full((20, 3), 1 / 40), rtol=2**-8, atol=0)


def test_the_likeliest_are_chosen_however_far_apart_they_are(kernels: NativeKernels) -> None:
    made = block("qwen3_moe")
    made.gate.weight.data[:] = 0
    made.gate.weight.data[[3, 17, 39], 0] = torch.tensor([300.0, 200.0, 100.0], dtype=BF16)
    x = torch.zeros(2, 64, dtype=BF16)
    x[:, 0] = torch.tensor([1.0, -1.0])
    _, shares, chosen = NativeRouter(kernels, made.gate)(x)
    assert chosen[0, 0] == 3 and shares[0, 0] == 1
    assert not {3, 17, 39} & set(chosen[1].tolist())


def test_what_is_no_number_shows(kernels: NativeKernels) -> None:
    made = NativeMixture(kernels, parts_of(kernels, block("qwen2_moe")))
    x = noise(20)
    expected = made(x)
    x[0, 7] = torch.nan
    found = made(x)
    assert found[0, 7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[0, others], expected[0, others])


def test_what_is_not_all_ours_stays(kernels: NativeKernels) -> None:
    assert not NativeMixture.fits(block("qwen3_moe"))
    with_more = parts_of(kernels, block("qwen3_moe"))
    with_more.more = nn.Linear(2, 2)
    assert not NativeMixture.fits(with_more)
    half = parts_of(kernels, block("qwen2_moe"))
    half.shared_expert = block("qwen2_moe").shared_expert
    assert not NativeMixture.fits(half)
