"""Fused routers on a GPU, against transformers' own, and a call of one as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from engine.compute.native.observation import Seen
from tests.support.device_waits import waiting_refused
from tests.support.routers import BY_GROUPS, PLAIN, router_of

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.compute.cuda.expert_layout import Choice  # noqa: E402
from engine.compute.cuda.fused_router import FusedRouter, choose, equal_router  # noqa: E402
from engine.compute.cuda.graphs.recorder import CudaRecorder  # noqa: E402

CUDA = torch.device("cuda", 0)
HIDDEN = 2048


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", [*PLAIN, *BY_GROUPS])
@torch.inference_mode()
def test_experts_and_shares_are_the_routers_own(family: str, dtype: torch.dtype) -> None:
    router = router_of(family, HIDDEN, dtype).to(CUDA)
    for count in (1, 17, 300):
        rows = torch.randn(count, HIDDEN, device=CUDA, dtype=dtype) / HIDDEN**0.5
        assert equal_router(router, Seen((rows,), {}, router(rows)), dtype) is not None


@pytest.mark.parametrize("choice", [Choice(33, 4), Choice(128, 8), Choice(512, 10), Choice(3, 3)])
@torch.inference_mode()
def test_the_likeliest_come_first_and_of_equal_ones_the_first(choice: Choice) -> None:
    logits = torch.randn(300, choice.count, device=CUDA).round(decimals=1)
    shares, chosen = choose(logits, choice, torch.float32)
    assert torch.equal(chosen, logits.sort(stable=True, dim=1, descending=True).indices[:, : choice.each])
    torch.testing.assert_close(shares, logits.gather(1, chosen).softmax(1))
    alone = choose(logits[7:8].contiguous(), choice, torch.float32)
    assert torch.equal(alone[0][0], shares[7]) and torch.equal(alone[1][0], chosen[7])


@torch.inference_mode()
def test_a_number_that_is_not_finite_shows() -> None:
    logits = torch.randn(3, 128, device=CUDA)
    logits[1, 7] = torch.nan
    shares, chosen = choose(logits, Choice(128, 8), torch.float32)
    assert shares.isnan().any(1).tolist() == [False, True, False]
    assert bool(((chosen >= 0) & (chosen < 128)).all())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@torch.inference_mode()
def test_a_recorded_call_follows_its_rows_and_waits_for_nothing(family: str) -> None:
    router = FusedRouter(router_of(family, HIDDEN, torch.bfloat16).to(CUDA))
    rows = torch.randn(20, HIDDEN, device=CUDA, dtype=torch.bfloat16)
    _, shares, chosen = router(rows)

    def work() -> None:
        for own, other in zip((shares, chosen), router(rows)[1:], strict=True):
            own.copy_(other)

    replay = CudaRecorder(CUDA).record(work)
    for _ in range(3):
        rows.normal_()
        with waiting_refused():
            replay()
        expected = router(rows)[1:]
        assert torch.equal(shares, expected[0]) and torch.equal(chosen, expected[1])
