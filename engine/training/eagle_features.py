"""What the target makes of whole texts, for a drafter to learn from, in shards beside those of the texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.compute.attention import AttentionContext
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.layer_taps import base_name, tap
from engine.compute.runner.packed_forward import PackedForward
from engine.training.samples import Sample
from engine.training.written import written

_BLOCK_SIZE = 16
_PASS_TOKENS = 2048  # computed at a time, or one longer text


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A sample with its prompt, and what the target made of each of its tokens but the last.

    `features` are the residual streams that are read, side by side, and behind them what the target's head
    read: [n - 1, (layers + 1) * hidden], in the target's dtype, mapped from a file.
    """

    sample: Sample
    token_ids: torch.Tensor  # int64 [n]
    features: torch.Tensor

    @property
    def num_answered(self) -> int:
        """How many of its tokens the target generated."""
        return len(self.sample.token_ids)


class FeatureReader:
    """Runs the target over texts, many in a pass, and keeps what enters `layers` and what its head reads."""

    def __init__(self, target: LoadedModel, layers: Sequence[int], longest: int) -> None:
        """`longest` is the most tokens of a text. For a target that can be rewound."""
        self._base: Any = getattr(target.model, base_name(target.model))
        self._layers = tuple(layers)
        self._forward = PackedForward(target)
        num_blocks = math.ceil(max(longest, 2 * _PASS_TOKENS) / _BLOCK_SIZE)
        self._kv = self._forward.make_kv(num_blocks, _BLOCK_SIZE)

    @torch.inference_mode()
    def read(self, texts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Of each text, [tokens, (layers + 1) * hidden] on the CPU, a pass at a time."""
        parts: list[Part] = []
        next_block = 0
        for text in texts:
            num_blocks = math.ceil(len(text) / _BLOCK_SIZE)
            if parts and (next_block + num_blocks) * _BLOCK_SIZE > _PASS_TOKENS:
                yield from self._compute(parts)
                parts, next_block = [], 0
            blocks = range(next_block, next_block + num_blocks)
            parts.append(Part(text.tolist(), 0, len(text), blocks))
            next_block += num_blocks
        if parts:
            yield from self._compute(parts)

    def _compute(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        forward, device = self._forward, self._kv.device
        inputs = pack_step(parts, _BLOCK_SIZE)
        token_ids = torch.tensor(inputs.token_ids, device=device)
        positions = torch.tensor(inputs.positions, device=device)
        context = AttentionContext(inputs, self._kv, forward.backend)
        last: list[torch.Tensor] = []
        hook = self._base.register_forward_hook(lambda *given: last.append(given[2].last_hidden_state[0]))
        try:
            some_row = torch.zeros(1, dtype=torch.long, device=device)
            _, entered = tap(
                self._base,
                self._layers,
                lambda: forward.compute(token_ids, positions, context, some_row),
            )
        finally:
            hook.remove()
        found = torch.cat([entered, last[0]], dim=-1).cpu()
        return torch.split(found, [part.stop for part in parts])


class FeatureShards:
    """A file of features for each shard of samples; one that is missing or unfit is made again."""

    def __init__(self, directory: Path, about: str) -> None:
        """`about` is whatever features depend on besides the texts."""
        self._directory = directory
        self._about = about

    def examples(
        self, number: int, samples: Sequence[Sample], texts: Sequence[torch.Tensor]
    ) -> list[Example] | None:
        """Those of shard `number`, whose samples have these texts; None where there is no file that fits."""
        path = self._path(number)
        lengths = [len(text) - 1 for text in texts]
        try:
            with safe_open(path, framework="pt") as file:
                about = (file.metadata() or {}).get("about")
                features = file.get_tensor("features")
        except (OSError, SafetensorError):
            return None
        if about != self._about or len(features) != sum(lengths):
            return None
        parts = zip(samples, texts, torch.split(features, lengths), strict=True)
        return [Example(sample, text, part) for sample, text, part in parts]

    def write(self, number: int, features: Sequence[torch.Tensor]) -> None:
        """Keep those of a shard's texts; whole or not at all. Raises StartRefused."""
        path = self._path(number)
        half_written = path.with_suffix(".part")
        with written(path):
            save_file({"features": torch.cat(list(features))}, half_written, metadata={"about": self._about})
            half_written.replace(path)

    def _path(self, number: int) -> Path:
        return self._directory / f"features-{number:05d}.safetensors"
