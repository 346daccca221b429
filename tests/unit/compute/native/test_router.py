"""What chooses experts: the same as the original chooses, and the same for a row alone as among many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MiniMaxConfig, MixtralConfig, OlmoeConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax.modeling_minimax import MiniMaxTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from engine.compute.native.observation import Observation, Seen
from engine.compute.native.places import Place
from engine.compute.native.replacement import make_equal
from engine.compute.native.router import NativeRouter
from tests.support.native import compiled_kernels

BF16 = torch.bfloat16
HIDDEN = 1024


def router(kind: Any, config: Any) -> Any:
    made = kind(config).requires_grad_(False)
    made.weight.data = noise(*made.weight.shape, seed=1) / HIDDEN**0.5
    return made


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


ORIGINALS = {
    "mixtral": lambda: router(MixtralTopKRouter, MixtralConfig(hidden_size=HIDDEN, num_local_experts=8)),
    "qwen3": lambda: router(
        Qwen3MoeTopKRouter, Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=64, norm_topk_prob=True)
    ),
    "qwen3.5": lambda: router(Qwen3_5MoeTopKRouter, Qwen3_5MoeTextConfig(hidden_size=HIDDEN, num_experts=64)),
    "minimax": lambda: router(MiniMaxTopKRouter, MiniMaxConfig(hidden_size=HIDDEN, num_local_experts=32)),
    "not normed": lambda: router(
        OlmoeTopKRouter, OlmoeConfig(hidden_size=HIDDEN, num_experts=40, norm_topk_prob=False)
    ),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_it_chooses_as_the_original(name: str) -> None:
    original = ORIGINALS[name]()
    assert NativeRouter.fits(original, BF16) and not NativeRouter.fits(original, torch.float32)
    x = noise(300, HIDDEN)
    logits, shares, chosen = NativeRouter(compiled_kernels(), original)(x)
    expected_logits, expected_shares, expected_chosen = original(x)
    torch.testing.assert_close(logits, expected_logits, rtol=2**-7, atol=1e-3)
    same = (chosen == expected_chosen).all(-1)
    assert same.float().mean() > 0.9  # but where two are as likely within rounding
    assert shares.dtype is expected_shares.dtype
    torch.testing.assert_close(shares[same], expected_shares[same], rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_row_is_the_same_bits_in_any_company(name: str) -> None:
    made = NativeRouter(compiled_kernels(), ORIGINALS[name]())
    x = noise(300, HIDDEN)
    together = made(x)
    for n in (1, 2, 7, 100):
        apart = zip(*(made(x[first : first + n]) for first in range(0, 300, n)), strict=True)
        for found, expected in zip(apart, together, strict=True):
            assert torch.equal(torch.cat(found), expected)


def test_others_stay() -> None:
    other = router(GraniteMoeTopKRouter, MixtralConfig(hidden_size=HIDDEN))
    assert not NativeRouter.fits(other, BF16)


@pytest.mark.parametrize("wrong", [None, "other experts", "other shares", "other type"])
def test_one_that_answers_otherwise_stays(wrong: str | None) -> None:
    original, x = ORIGINALS["qwen3"](), noise(40, HIDDEN)
    logits, shares, chosen = original(x)
    if wrong == "other experts":
        chosen = (chosen + 1) % 64
    if wrong == "other shares":
        shares = shares * 1.1
    if wrong == "other type":
        shares = shares.float()
    place = Place("gate", Place.ROUTER)
    seen = {"gate": Seen((x,), {}, (logits, shares, chosen))}
    nothing: Any = None
    observation = Observation(seen, {}, nothing, nothing)
    made = make_equal(original, place, observation, nothing, compiled_kernels())
    assert (made is None) is (wrong is not None)
