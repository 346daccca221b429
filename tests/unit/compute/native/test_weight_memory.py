"""Where packed weights lie: side by side in huge pages, elements apart from the blocks made of them."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType

from tests.support.native import compiled_kernels


def test_weights_share_regions_by_what_they_are_of_and_tiny_ones_lie_alone() -> None:
    kernels = compiled_kernels()
    weights = [kernels.pack(torch.randn(512, 512).to(kernels.dtype)) for _ in range(2)]
    blocks = [kernels.quantize(each, GGMLQuantizationType.Q8_0) for each in weights]
    tiny = kernels.pack(torch.randn(32, 64).to(kernels.dtype))
    elements = {each.packed.untyped_storage().data_ptr() for each in weights}
    panels = {part.panels.untyped_storage().data_ptr() for each in blocks for part in each.parts}
    assert len(elements) == len(panels) == 1 and elements.isdisjoint(panels)
    assert tiny.packed.untyped_storage().nbytes() == 2 * 32 * 64
