"""How far logits may be apart: by rounding, which is coarser where inputs are rounded to 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.compute.attention import AttentionContext
from engine.compute.runner import self_check
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.self_check import check_block_size, check_forward, packed_difference
from tests.support.packed import load_tiny


@pytest.mark.parametrize(
    ("part", "is_rounding"), [(0.05, (True, True)), (0.2, (False, True)), (0.5, (False, False))]
)
def test_blocks_may_change_logits_by_more(part: float, is_rounding: tuple[bool, bool]) -> None:
    expected = torch.randn(39, 256, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(39, 256, generator=torch.Generator().manual_seed(1))
    for has_blocks, may_be in zip((False, True), is_rounding, strict=True):
        found = packed_difference(expected + part * noise, expected, torch.bfloat16, has_blocks)
        assert (found is None) is may_be


def test_kernels_are_compiled_for_no_second_size_of_blocks() -> None:
    assert check_block_size(torch.device("cuda"), 16) == 16
    assert check_block_size(torch.device("cpu"), 16) < 8, "short sequences have several"


@pytest.mark.parametrize("served", [2, 16, 64])
def test_any_size_of_blocks_serves_the_check(served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    forward = PackedForward(load_tiny("llama"))
    compute = forward.compute

    def noted(*given: Any) -> torch.Tensor:
        context: AttentionContext = given[2]
        used.append(context.kv.block_size)
        return compute(*given)

    monkeypatch.setattr(forward, "compute", noted)
    monkeypatch.setattr(self_check, "check_block_size", lambda _, size: size)
    check_forward(forward, served)
    assert set(used) == {served}
