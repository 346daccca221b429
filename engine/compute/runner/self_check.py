"""Is this model, served our way, still the model? Asked once at start, of the real weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from engine.compute.attention.own_attention import EAGER, attending_with
from engine.compute.loading.coded_weights import rounds_inputs
from engine.compute.recurrent.recurrent_forward import RecurrentForward
from engine.compute.recurrent.state_memory import MemorySizes
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.runner.scratch_pass import ScratchPass
from engine.errors import UnsupportedModel

_BLOCK_SIZE = 4  # small, so that even short sequences have several
_LENGTHS = (24, 15)
# Where each of the two sequences is cut: prompts in chunks, single tokens alone and together, short runs.
_CUTS = ((0, 11, 12, 13, 17, 24), (0, 0, 7, 8, 12, 15))
_WHOLE = tuple((0, length) for length in _LENGTHS)
# By how much of a row's spread its logits may differ. Thirty layers round by 0.03 in bfloat16; attending to
# the wrong tokens differs by more than 0.5, a scale ten percent off by 0.06 to 0.2.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
# The same where inputs are rounded: by kernels that multiply with blocks to a 127th of the largest of 32, of
# FP8 to four bits. The least difference before can become one of a whole step, which makes less than 0.15 in
# thirty layers.
_TOLERANCE_WITH_BLOCKS = 0.3


def check_forward(
    forward: PackedForward | RecurrentForward, served_block_size: int = _BLOCK_SIZE
) -> torch.Tensor:
    """The packed logits, which are `packed_sample` on a CPU, where they equal plain ones.

    Runs two short sequences in chunks over scattered blocks and slots of scratch tensors, and whole as
    transformers does, with eager attention. The model's attention implementation is left as it was. Raises
    UnsupportedModel, naming the architecture, where the logits differ.

    On CUDA the blocks are of `served_block_size`: kernels are compiled for a size, which takes seconds.
    """
    packed, difference = _difference(forward, check_block_size(forward.loaded.device, served_block_size))
    tolerance = _TOLERANCES[forward.loaded.dtype]
    if rounds_inputs(forward.loaded.model):
        tolerance = max(tolerance, _TOLERANCE_WITH_BLOCKS)
    if not difference <= tolerance:  # NaN fails too
        raise UnsupportedModel(
            f"{type(forward.loaded.model).__name__} cannot be served exactly: its logits computed in "
            f"pieces differ from the plain forward pass by {difference:.2g} of their spread "
            f"(limit {tolerance})."
        )
    return packed


def check_block_size(device: torch.device, served: int) -> int:
    """The size of blocks to check with on `device`, where blocks of `served` tokens will be used."""
    return served if device.type == "cuda" else _BLOCK_SIZE


@torch.inference_mode()
def _difference(forward: PackedForward | RecurrentForward, block_size: int) -> tuple[torch.Tensor, float]:
    """Packed logits, and the median of their distances from plain ones, as a part of the spread."""
    sequences = _sequences(forward)
    packed = _packed_logits(forward, sequences, block_size=block_size)
    return packed, logits_distance(packed, _plain_logits(forward, sequences))


@torch.inference_mode()
def plain_sample(forward: PackedForward | RecurrentForward) -> torch.Tensor:
    """Logits of the same short sequences as transformers computes each whole: [tokens, vocab] in float32."""
    return _plain_logits(forward, _sequences(forward))


@torch.inference_mode()
def packed_sample(
    forward: PackedForward | RecurrentForward,
    kept: torch.dtype | None = None,
    block_size: int = _BLOCK_SIZE,
    *,
    in_pieces: bool = True,
) -> torch.Tensor:
    """Logits of the same short sequences computed in pieces: [tokens, vocab] in float32. `kept` is of K/V.

    Or each whole: the first is longer than the chunks in which states take in prompts on CUDA.
    """
    cuts = _CUTS if in_pieces else _WHOLE
    return _packed_logits(forward, _sequences(forward), kept, block_size, cuts)


def packed_difference(
    sample: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, has_blocks: bool
) -> str | None:
    """How far two samples of a model in `dtype` are apart, in words; None if by no more than rounding.

    `has_blocks` where kernels multiply with weights in blocks.
    """
    difference = logits_distance(sample, expected)
    tolerance = _TOLERANCE_WITH_BLOCKS if has_blocks else _TOLERANCES[dtype]
    if difference <= tolerance:
        return None
    return f"by {difference:.2g} of their spread (limit {tolerance})"


def logits_distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over rows of the distance between two [rows, vocab], as a part of the expected spread."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)  # [tokens]
    return float(((logits - expected).norm(dim=-1) / spread).median())


def _sequences(forward: PackedForward | RecurrentForward) -> list[list[int]]:
    limit = forward.loaded.max_model_len
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, forward.loaded.vocab_size, min(length, limit)).tolist() for length in _LENGTHS
    ]


def _plain_logits(forward: PackedForward | RecurrentForward, sequences: Sequence[list[int]]) -> torch.Tensor:
    """Transformers' own answer, sequence after sequence: [tokens, vocab] in float32."""
    model = forward.loaded.model
    with attending_with(model, EAGER) if forward.loaded.layers else nullcontext():
        return torch.cat(
            [
                model(input_ids=torch.tensor([tokens], device=forward.loaded.device), use_cache=False)
                .logits[0]
                .float()
                for tokens in sequences
            ]
        )


def _packed_logits(
    forward: PackedForward | RecurrentForward,
    sequences: Sequence[list[int]],
    kept: torch.dtype | None = None,
    block_size: int = _BLOCK_SIZE,
    cuts: Sequence[Sequence[int]] = _CUTS,
) -> torch.Tensor:
    """The same rows computed in pieces."""
    first, second = (-(-length // block_size) for length in _LENGTHS)
    num_blocks = 2 * (first + second)  # half of them stay free, so that the others lie apart
    compute = ScratchPass(forward, MemorySizes(num_blocks, block_size, len(_LENGTHS)), kept)
    scattered = np.random.default_rng(1).permutation(num_blocks).tolist()
    blocks = (scattered[:first], scattered[first : first + second])
    rows: tuple[list[torch.Tensor], ...] = ([], [])
    for step in _steps(sequences, cuts):
        parts = [Part(sequences[index], first, stop, blocks[index]) for index, first, stop in step]
        slots = np.array([index for index, _, _ in step], dtype=np.int32)
        logits = compute(replace(pack_step(parts, block_size, every_row=True), state_slots=slots)).float()
        start = 0
        for index, first, stop in step:
            rows[index].append(logits[start : start + stop - first])
            start += stop - first
    return torch.cat(rows[0] + rows[1])


def _steps(
    sequences: Sequence[list[int]], cuts: Sequence[Sequence[int]]
) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of (sequence, first, stop), single tokens first; empty pieces left out."""
    for cut in range(1, len(cuts[0])):
        pieces = [
            (index, cuts[index][cut - 1], min(cuts[index][cut], len(tokens)))
            for index, tokens in enumerate(sequences)
        ]
        pieces = [(index, first, stop) for index, first, stop in pieces if first < stop]
        if pieces:
            yield sorted(pieces, key=lambda piece: piece[2] - piece[1])
