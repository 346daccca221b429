"""What the sections of the benchmark share: the device, the sizes, and how progress is said and kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.compute.loading.loader import LoadedModel
from engine.text.tokenizer import Tokenizer
from tests.bench.gpu.made_models import fused, make_model, make_tokenizer
from tests.bench.gpu.sizes import HybridShape, LlamaShape, Sizes
from tests.bench.report import Section


@dataclass(frozen=True, slots=True)
class Bench:
    """`say` shows what is being measured; `keep` writes what a section has so far, should it be cut short."""

    device: torch.device
    sizes: Sizes
    say: Callable[[str], None]
    keep: Callable[[Section], None]

    def model(self, shape: LlamaShape | HybridShape, max_model_len: int) -> LoadedModel:
        """A model of this shape, on the device, its layers as they are served."""
        self.say(f"making the {shape.name}")
        return fused(make_model(shape.config(), self.sizes.dtype, self.device, max_model_len))

    def tokenizer(self, shape: LlamaShape | HybridShape, *, spells: bool = False) -> Tokenizer:
        """One whose vocabulary is as large as the shape's; see make_tokenizer."""
        return make_tokenizer(shape.vocab, spells=spells)
