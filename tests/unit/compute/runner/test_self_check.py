"""How far logits may be apart: by rounding, which is coarser where inputs are rounded to 8 bits."""

from __future__ import annotations

import pytest
import torch

from engine.compute.runner.self_check import packed_difference


@pytest.mark.parametrize(
    ("part", "is_rounding"), [(0.05, (True, True)), (0.2, (False, True)), (0.5, (False, False))]
)
def test_blocks_may_change_logits_by_more(part: float, is_rounding: tuple[bool, bool]) -> None:
    expected = torch.randn(39, 256, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(39, 256, generator=torch.Generator().manual_seed(1))
    for has_blocks, may_be in zip((False, True), is_rounding, strict=True):
        found = packed_difference(expected + part * noise, expected, torch.bfloat16, has_blocks)
        assert (found is None) is may_be
