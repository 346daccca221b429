"""Running tiny models through paged attention in the tests: any schedule, any blocks, either backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.compute.attention import AttentionBackend
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.own_attention import EAGER, attend_with
from engine.compute.loading.layer_probe import probe_layers
from engine.compute.loading.loader import LoadedModel
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from tests.support.tiny_models import EOS_ID, MAX_POSITIONS, VOCAB_SIZE, tiny_model

# A step of a schedule: (sequence, number of its tokens) in packed order.
Step = Sequence[tuple[int, int]]


@cache
def load_tiny(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The tiny model of `family` as the loader would give it; shared between tests."""
    return as_loaded(tiny_model(family, dtype=dtype))


def as_loaded(model: PreTrainedModel) -> LoadedModel:
    """A tiny model as the loader would give it."""
    probe = probe_layers(model, model.config)
    return LoadedModel(
        model=model,
        config=model.config,
        dtype=model.dtype,
        device=torch.device("cpu"),
        max_model_len=MAX_POSITIONS,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_ID}),
        layers=probe.layers,
        states=probe.states,
        attending=probe.attending,
    )


def packed_forward(loaded: LoadedModel, backend: AttentionBackend) -> PackedForward:
    """The forward pass with the backend to test."""
    forward = PackedForward(loaded)
    forward.backend = backend
    return forward


@torch.inference_mode()
def plain_logits(loaded: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Transformers' own forward pass: [tokens, vocab]."""
    attend_with(loaded.model, EAGER)
    logits: torch.Tensor = loaded.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    """Ids that are no special token."""
    return [int(token) for token in rng.integers(3, VOCAB_SIZE, length)]


@torch.inference_mode()
def run_schedule(
    forward: PackedForward,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Step],
    block_size: int,
    rng: np.random.Generator,
) -> list[torch.Tensor]:
    """The logits of every scheduled token of each sequence, [computed, vocab].

    Blocks are handed out in random order as a sequence grows, from a pool that holds a few more.
    """
    num_blocks = sum(-(-len(tokens) // block_size) for tokens in sequences) + 3
    kv = forward.make_kv(num_blocks, block_size)
    free = rng.permutation(num_blocks).tolist()
    blocks: list[list[int]] = [[] for _ in sequences]
    computed = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        parts = []
        for index, count in step:
            first, stop = computed[index], computed[index] + count
            while len(blocks[index]) * block_size < stop:
                blocks[index].append(free.pop())
            parts.append(Part(sequences[index], first, stop, list(blocks[index])))
            computed[index] = stop
        rows = forward(pack_step(parts, block_size, every_row=True), kv)
        for (index, count), chunk in zip(step, torch.split(rows, [n for _, n in step]), strict=True):
            assert len(chunk) == count
            logits[index].append(chunk)
    return [torch.cat(chunks) for chunks in logits]


def random_schedule(
    rng: np.random.Generator, lengths: Sequence[int], max_chunk: int, decode_bias: float = 0.5
) -> list[list[tuple[int, int]]]:
    """Steps that compute sequences of `lengths` to their ends, in random chunks and random company."""
    left = list(lengths)
    steps = []
    while any(left):
        chosen = [index for index, count in enumerate(left) if count and rng.random() < 0.7]
        step = []
        for index in chosen:
            count = 1 if rng.random() < decode_bias else int(rng.integers(1, max_chunk + 1))
            count = min(count, left[index])
            left[index] -= count
            step.append((index, count))
        if step:
            steps.append(sorted(step, key=lambda part: part[1] > 1))
    return steps


def random_kv(kv: KvTensors, generator: torch.Generator) -> KvTensors:
    """Fill every slot with noise: what a test does not overwrite is then another's stale content."""
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return kv


def is_the_same_in_any_company(forward: PackedForward) -> bool:
    """Whether a token's logits have the same bits with one token a sequence and step, and with up to 32."""
    lengths = [70, 5, 40]
    texts = [random_tokens(np.random.default_rng(3), length) for length in lengths]

    def logits(max_chunk: int) -> torch.Tensor:
        rng = np.random.default_rng(max_chunk)
        steps = random_schedule(rng, lengths, max_chunk)
        return torch.cat(run_schedule(forward, texts, steps, 4, rng))

    alone = logits(1)
    return all(torch.equal(logits(most), alone) for most in (2, 9, 32))
