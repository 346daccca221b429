"""Draft trees: every branch has the logits it would have alone, and the accepted one stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute.attention import (
    AttentionBackend,
    AttentionContext,
    CpuAttention,
    LayerCall,
    ReferenceAttention,
)
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.attention.tree_mask import accepted_moves, tree_masks
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.plan.step_records import NO_TOKEN, StepInputs
from tests.support.examples import share_of
from tests.support.packed import load_tiny, packed_forward, plain_logits, random_kv, random_tokens
from tests.support.tiny_models import FAMILIES, WINDOW

BACKENDS = [pytest.param(CpuAttention(), id="cpu"), pytest.param(ReferenceAttention(), id="reference")]
CPU = torch.device("cpu")


def random_parents(rng: np.random.Generator, count: int, deepening: float) -> list[int]:
    """A tree of `count` drafts; the nearer `deepening` is to 1, the more it is a chain."""
    return [i - 1 if rng.random() < deepening else int(rng.integers(-1, i)) for i in range(count)]


def branch(parents: Sequence[int], draft: int) -> list[int]:
    """The drafts from the first behind the newest token down to `draft`; none for -1."""
    path: list[int] = []
    while draft >= 0:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]


# --- whole models ---


@dataclass
class Growing:
    """One sequence under verification: its committed tokens, of which all but the last are in the cache."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    parents: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    def part(self, stop: int | None = None) -> Part:
        return Part(
            self.tokens + self.drafts,
            self.computed,
            stop or len(self.tokens) + len(self.drafts),
            self.blocks,
            self.parents,
        )


def propose(rng: np.random.Generator, sequence: Growing, max_drafts: int, kind: str) -> None:
    count = 0 if kind == "decode" else int(rng.integers(1, max_drafts + 1))
    sequence.parents = random_parents(rng, count, 1.0 if kind == "chain" else 0.75)
    sequence.drafts = random_tokens(rng, count)


def accept(rng: np.random.Generator, sequence: Growing) -> list[int]:
    """Commit a random branch and one token more; the sampled rows that say so."""
    draft = int(rng.integers(-1, len(sequence.parents)))
    path = [sequence.drafts[node] for node in branch(sequence.parents, draft)]
    committed = [*path, *random_tokens(rng, 1)]
    sequence.computed = len(sequence.tokens) + len(path)
    sequence.tokens += committed
    rows = committed + [NO_TOKEN] * (len(sequence.drafts) + 1 - len(committed))
    sequence.parents, sequence.drafts = [], []
    return rows


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", (*FAMILIES, "bloom", "falcon_alibi"))
def test_rounds_of_verification(family: str, block_size: int, backend: AttentionBackend) -> None:
    """Trees beside chains, decodes and a prompt in chunks; whatever was accepted, the next round is right."""
    rng = np.random.default_rng(block_size)
    loaded = load_tiny(family)
    contexts = [1, WINDOW, 13, 30, 2, 21]
    kinds = ["tree", "chain", "tree", "tree", "tree", "decode"]
    per_sequence = -(-120 // block_size)
    blocks = rng.permutation((len(contexts) + 1) * per_sequence).reshape(-1, per_sequence).tolist()
    sequences = [
        Growing(random_tokens(rng, length), own) for length, own in zip(contexts, blocks, strict=False)
    ]
    prompt = Growing(random_tokens(rng, 40), blocks[-1])
    with torch.inference_mode():
        forward = packed_forward(loaded, backend)
        kv = forward.make_kv(len(contexts) * per_sequence + per_sequence, block_size)
        fed = [sequence for sequence in sequences if len(sequence.tokens) > 1]
        forward(pack_step([sequence.part(len(sequence.tokens) - 1) for sequence in fed], block_size), kv)
        for sequence in sequences:
            sequence.computed = len(sequence.tokens) - 1
        for _ in range(4):
            for sequence, kind in zip(sequences, kinds, strict=True):
                propose(rng, sequence, 2 * WINDOW, kind)
            stop = min(prompt.computed + 9, len(prompt.tokens))
            parts = [prompt.part(stop), *(sequence.part() for sequence in sequences)]
            inputs = pack_step(parts, block_size)
            logits = forward(inputs, kv)
            check_branches(family, prompt, sequences, stop, logits)
            packed_forward(loaded, backend)  # what was plain is packed again
            prompt.computed = stop
            rows = [NO_TOKEN, *(row for sequence in sequences for row in accept(rng, sequence))]
            kv.move_rows(*accepted_moves(inputs, rows))


def check_branches(
    family: str, prompt: Growing, sequences: Sequence[Growing], stop: int, logits: torch.Tensor
) -> None:
    """Every row is what the plain model gives for the tokens on the way to it and nothing else."""
    loaded = load_tiny(family)
    expected = [plain_logits(loaded, prompt.tokens[:stop])[-1]]
    for sequence in sequences:
        rows: dict[int, torch.Tensor] = {}
        for draft in range(len(sequence.drafts) - 1, -2, -1):  # deepest first: their prefixes come with them
            if draft not in rows:
                path = branch(sequence.parents, draft)
                plain = plain_logits(loaded, sequence.tokens + [sequence.drafts[node] for node in path])
                rows |= dict(zip([-1, *path], plain[-len(path) - 1 :], strict=True))
        expected += [rows[draft] for draft in range(-1, len(sequence.drafts))]
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=1e-4)


# --- one layer of noise ---

Verified = tuple[int, list[int]]  # (tokens before the newest one, parents of the drafts)


def make_step(verified: Sequence[Verified], block_size: int) -> tuple[StepInputs, int]:
    needed = [-(-(context + 1 + len(parents)) // block_size) for context, parents in verified]
    free = np.random.default_rng(0).permutation(sum(needed) + 2).tolist()
    parts = []
    for (context, parents), blocks in zip(verified, needed, strict=True):
        stop = context + 1 + len(parents)
        parts.append(Part([7] * stop, context, stop, [free.pop() for _ in range(blocks)], parents))
    return pack_step(parts, block_size), sum(needed) + 2


def expected_attention(
    verified: Sequence[Verified], inputs: StepInputs, query: torch.Tensor, kv: KvTensors, call: LayerCall
) -> torch.Tensor:
    """Each token attends to a list of slots: those before its sequence's drafts and those of its branch."""
    keys, values = kv.keys[0].transpose(1, 2).flatten(0, 1), kv.values[0].transpose(1, 2).flatten(0, 1)
    rows, row = [], 0
    for sequence, (context, parents) in enumerate(verified):
        table = inputs.block_tables[sequence].tolist()
        for draft in range(-1, len(parents)):
            places = [*range(context + 1), *(context + 1 + node for node in branch(parents, draft))]
            places = places[-call.window :] if call.window else places
            depth = context + len(branch(parents, draft))  # the token's position
            places = places[-(depth % call.chunk + 1) :] if call.chunk else places
            slots = [
                table[place // kv.block_size] * kv.block_size + place % kv.block_size for place in places
            ]
            heads = query.shape[1] // keys.shape[1]
            seen = keys[slots].repeat_interleave(heads, dim=1)  # [places, heads, dim]
            scores = torch.einsum("hd,phd->hp", query[row], seen) * call.scaling
            if call.softcap:
                scores = (scores / call.softcap).tanh() * call.softcap
            if call.sinks is not None:
                scores = torch.cat((scores, call.sinks[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(slots)]
            rows.append(torch.einsum("hp,phd->hd", weights, values[slots].repeat_interleave(heads, dim=1)))
            row += 1
    return torch.stack(rows)


def check_layer(
    verified: Sequence[Verified],
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 4,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Both backends against the lists of slots."""
    inputs, num_blocks = make_step(verified, block_size)
    num_tokens = len(inputs.token_ids)
    layer = LayerKv(2, 8, 6, window, chunk)
    call = LayerCall(0, 0.3, window, softcap, chunk, sinks)
    with torch.inference_mode():
        for backend in (CpuAttention(), ReferenceAttention()):
            generator = torch.Generator().manual_seed(1)
            kv = random_kv(KvTensors((layer,), num_blocks, block_size, torch.float32, CPU), generator)
            shapes = [(num_tokens, 6, 8), (num_tokens, 2, 8), (num_tokens, 2, 6)]
            query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
            ours = AttentionContext(inputs, kv, backend).attend(query, key, value, call)
            expected = expected_attention(verified, inputs, query, kv, call)
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@st.composite
def verified_sequences(draw: st.DrawFn) -> Verified:
    count = draw(st.integers(0, 12))
    return draw(st.integers(0, 40)), [draw(st.integers(-1, i - 1)) for i in range(count)]


@settings(max_examples=share_of(60), deadline=None)
@given(
    verified=st.lists(verified_sequences(), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.one_of(st.none(), st.just(4.0)),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_any_trees(
    verified: list[Verified], window: int | None, softcap: float | None, block_size: int
) -> None:
    check_layer(verified, window, softcap, block_size)


@settings(max_examples=share_of(40), deadline=None)
@given(
    verified=st.lists(verified_sequences(), min_size=1, max_size=6),
    chunk=st.one_of(st.none(), st.integers(1, 30)),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_any_trees_beside_sinks_and_in_chunks(
    verified: list[Verified], chunk: int | None, block_size: int
) -> None:
    check_layer(verified, chunk=chunk, block_size=block_size, sinks=torch.linspace(-3, 3, 6))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 40])
@pytest.mark.parametrize("deepening", [0.0, 0.6, 0.95])
def test_windows_count_depth(window: int | None, deepening: float) -> None:
    rng = np.random.default_rng(0)
    check_layer([(length, random_parents(rng, 20, deepening)) for length in (0, 1, 3, 17, 17, 60)], window)


@pytest.mark.parametrize("window", [None, 7, 100])
def test_a_tree_larger_than_a_query_tile(window: int | None) -> None:
    rng = np.random.default_rng(1)
    check_layer([(30, random_parents(rng, 150, 0.5)), (5, random_parents(rng, 150, 0.9))], window)
    check_layer([(600, random_parents(rng, 80, 0.5))], window, block_size=16)


def test_siblings_share_no_key() -> None:
    """Sixteen first drafts of one token: each sees the context and itself."""
    check_layer([(9, [-1] * 16), (4, [-1] * 16)])


def test_chains_by_their_parents_are_laid_out_as_chains() -> None:
    inputs, _ = make_step([(5, [-1, 0, 1]), (7, [-1]), (3, [])], 4)
    assert inputs.drafts is not None and inputs.drafts.parents is not None
    assert tree_masks(inputs) == {}
