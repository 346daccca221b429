"""A mixture's experts in one call: right however rows are spread, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.compute.native.experts import NativeExperts
from engine.compute.native.kernels import NativeKernels
from engine.compute.native.quantization import Q4_1, Q8_0
from engine.compute.native.records import Activation
from tests.support.expert_mixtures import ACTIVATIONS, Mixture, random_rows
from tests.support.gguf_blocks import in_blocks
from tests.support.native import compiled_kernels

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("two_threads")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the roundings of a gate, an activation, an expert's output and the sum, in each row."""
    lengths = expected.norm(dim=-1)
    assert ((found.double() - expected).norm(dim=-1) <= 2**-6 * lengths).all()


@pytest.mark.parametrize("n", [1, 2, 9, 200])
@pytest.mark.parametrize(("hidden", "width"), [(32, 32), (96, 64), (64, 160)])
def test_every_row_goes_through_its_own_experts(
    kernels: NativeKernels, n: int, hidden: int, width: int
) -> None:
    mixture = Mixture.random(hidden, width, BF16)
    rows = random_rows(n, hidden, BF16)
    assert_close(mixture.packed(kernels)(*rows), mixture.expected(*rows))


@pytest.mark.parametrize("activation", Activation)
def test_activations(kernels: NativeKernels, activation: Activation) -> None:
    mixture = Mixture.random(64, 96, BF16, activation)
    rows = random_rows(7, 64, BF16)
    assert_close(mixture.packed(kernels)(*rows), mixture.expected(*rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 9, 200])
def test_experts_without_gates(kernels: NativeKernels, n: int, activation: Activation) -> None:
    mixture = Mixture.random(64, 96, BF16, activation, is_gated=False)
    rows = random_rows(n, 64, BF16)
    assert_close(mixture.packed(kernels)(*rows), mixture.expected(*rows))


def test_all_rows_may_choose_one_expert(kernels: NativeKernels) -> None:
    mixture = Mixture.random(64, 96, BF16)
    x, _, _ = random_rows(250, 64, BF16)
    for expert in (0, 3, 5):
        rows = x, torch.full((250, 1), expert), torch.ones(250, 1)
        assert_close(mixture.packed(kernels)(*rows), mixture.expected(*rows))


def test_an_expert_that_no_row_chose_is_not_read(kernels: NativeKernels) -> None:
    mixture = Mixture.random(64, 96, BF16)
    x, chosen, shares = random_rows(50, 64, BF16)
    chosen = torch.where(chosen == 2, 4, chosen)
    expected = mixture.expected(x, chosen, shares)
    mixture.gate_up[2], mixture.down[2] = torch.nan, torch.nan
    assert_close(mixture.packed(kernels)(x, chosen, shares), expected)


def test_a_number_that_no_expert_has_is_left_out(kernels: NativeKernels) -> None:
    mixture = Mixture.random(64, 96, BF16)
    x, chosen, shares = random_rows(50, 64, BF16)
    chosen[::3, 1], chosen[1::3, 0] = Mixture.COUNT, -1
    chosen[7] = Mixture.COUNT
    found = mixture.packed(kernels)(x, chosen, shares)
    expected = mixture.expected(x, chosen, shares)
    assert not expected[7].any() and not found[7].any()
    assert_close(found, expected)


@pytest.mark.parametrize("block_format", [Q8_0, Q4_1])
def test_experts_without_gates_of_few_bits(block_format: int) -> None:
    kernels = compiled_kernels(formats=True)
    mixture = Mixture.random(96, 160, BF16, Activation.RELU_SQUARED, is_gated=False)
    x, chosen, shares = random_rows(30, 96, BF16)
    found = mixture.packed(kernels, block_format)(x, chosen, shares).double()
    expected = mixture.expected(in_blocks(x), chosen, shares)
    assert (found - expected).norm() <= (0.02 if block_format == Q8_0 else 0.15) * expected.norm()


def test_no_rows(kernels: NativeKernels) -> None:
    mixture = Mixture.random(64, 96, BF16)
    x, chosen, shares = random_rows(3, 64, BF16)
    assert mixture.packed(kernels)(x[:0], chosen[:0], shares[:0]).shape == (0, 64)


def test_what_is_not_finite_stays_in_its_row(kernels: NativeKernels) -> None:
    mixture = Mixture.random(64, 96, BF16)
    x, chosen, shares = random_rows(20, 64, BF16)
    packed = mixture.packed(kernels)
    whole = packed(x, chosen, shares)
    x[4, 9] = torch.nan
    found = packed(x, chosen, shares)
    assert found[4].isnan().all()
    others = torch.arange(20) != 4
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("block_format", [None, Q8_0, Q4_1])
def test_a_row_is_the_same_bits_in_any_company(block_format: int | None) -> None:
    kernels = compiled_kernels(formats=block_format is not None)
    x, chosen, shares = random_rows(260, 64, BF16)
    packed = Mixture.random(64, 96, BF16).packed(kernels, block_format)
    kernels.team.resize(1)
    whole = packed(x, chosen, shares)
    for threads in (1, 2, 3):
        kernels.team.resize(threads)
        for n in (1, 2, 5, 13, 97):
            rows = slice(100, 100 + n)
            assert torch.equal(packed(x[rows].contiguous(), chosen[rows], shares[rows]), whole[rows])
    elsewhere = torch.randperm(260, generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed(x[elsewhere], chosen[elsewhere], shares[elsewhere]), whole[elsewhere])


@pytest.mark.parametrize(("block_format", "near"), [(Q8_0, 0.02), (Q4_1, 0.15)])
def test_experts_of_few_bits(block_format: int, near: float) -> None:
    """Rounded as other weights are, and near what they were."""
    kernels = compiled_kernels(formats=True)
    mixture = Mixture.random(96, 160, BF16)
    x, chosen, shares = random_rows(30, 96, BF16)
    found = mixture.packed(kernels, block_format)(x, chosen, shares).double()
    expected = mixture.expected(in_blocks(x), chosen, shares)
    assert (found - expected).norm() <= near * expected.norm()


# --- the stand-in ---


def experts_of(kind: Any, config: Any) -> Any:
    """Random ones, which transformers computes one after the other."""
    config._experts_implementation = "eager"
    made = kind(config).to(BF16).requires_grad_(False)
    for index, parameter in enumerate(made.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).to(BF16)
    return made


def mixtral(**changes: Any) -> Any:
    options = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 6} | changes
    return experts_of(MixtralExperts, MixtralConfig(**options))


def qwen(**changes: Any) -> Any:
    options = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 6} | changes
    return experts_of(Qwen3MoeExperts, Qwen3MoeConfig(**options))


def nemotron(**changes: Any) -> Any:
    options = {"hidden_size": 64, "moe_intermediate_size": 96, "n_routed_experts": 6} | changes
    return experts_of(NemotronHExperts, NemotronHConfig(**options))


@pytest.mark.parametrize(
    "original",
    [
        mixtral(),
        qwen(),
        mixtral(hidden_act="gelu_pytorch_tanh"),
        nemotron(),
        nemotron(mlp_hidden_act="silu"),
        nemotron(hidden_size=96, moe_latent_size=64),
    ],
)
@pytest.mark.parametrize("of_shares", [BF16, torch.float32])
def test_the_stand_in_answers_as_the_original(
    kernels: NativeKernels, original: Any, of_shares: torch.dtype
) -> None:
    assert NativeExperts.fits(original, BF16)
    x, chosen, shares = random_rows(40, 64, BF16)
    rows = x, chosen, shares.to(of_shares)
    expected = original(*rows).double()
    found = NativeExperts(kernels, original)(*rows).double()
    assert ((found - expected).norm(dim=-1) <= 0.02 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("original", [qwen(), nemotron()])
def test_the_stand_in_keeps_one_copy_of_the_weights(kernels: NativeKernels, original: Any) -> None:
    made = NativeExperts(kernels, original)
    weights = sum(each.weights.packed.nbytes for each in (made.gate_up, made.down))
    assert weights == sum(parameter.nbytes for parameter in original.parameters())
    assert not list(made.parameters()) and not list(made.buffers())


class OfAnotherFamily(Qwen3MoeExperts):  # type: ignore[misc]
    """As if it did more."""


@pytest.mark.parametrize(
    "other",
    [
        qwen(hidden_act="relu"),
        qwen(hidden_size=48),
        qwen(moe_intermediate_size=80),
        nemotron(mlp_hidden_act="relu"),
        nemotron(moe_intermediate_size=80),
        qwen().float(),
        experts_of(OfAnotherFamily, qwen().config),
        nn.Linear(64, 64),
    ],
)
def test_others_stay(other: nn.Module) -> None:
    assert not NativeExperts.fits(other, BF16)


def limited(**changes: float) -> Any:
    """gpt-oss's experts: other way round, gate and up by turns, with biases."""
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=5)
    made = GptOssExperts(config).requires_grad_(False)
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[1] ** 0.5
    for name, value in changes.items():
        setattr(made, name, value)
    return made.to(BF16)


@pytest.mark.parametrize("n", [1, 9, 200])
def test_limited_experts_are_the_originals(kernels: NativeKernels, n: int) -> None:
    original = limited()
    assert NativeExperts.fits(original, BF16) and not NativeExperts.fits(original, torch.float32)
    x, chosen, shares = random_rows(n, 64, BF16)
    rows = 6 * x, chosen % 5, shares
    assert_close(NativeExperts(kernels, original)(*rows), limited().double()(rows[0].double(), *rows[1:]))


def test_experts_of_other_limits_stay() -> None:
    assert not NativeExperts.fits(limited(alpha=1.5), BF16)
    assert not NativeExperts.fits(limited(limit=8.0), BF16)
