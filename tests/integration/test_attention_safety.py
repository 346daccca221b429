"""What attention must not do: ignore an argument, mix sequences, or let a bad number travel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from engine.compute.attention import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionContext,
    CpuAttention,
    ReferenceAttention,
    register,
)
from engine.compute.attention.hf_interface import paged_attention
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.layer_kv import LayerKv
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.errors import UnsupportedModel
from engine.plan.step_records import BlockCopy
from tests.support.attention_noise import DRAFTS, Noise, check_what_shows
from tests.support.packed import load_tiny, packed_forward, plain_logits, random_tokens

BACKENDS = [pytest.param(CpuAttention(), id="cpu"), pytest.param(ReferenceAttention(), id="reference")]
BLOCK_SIZE = 4


# --- arguments ---


def call_attention(
    module: Any = None, mask: torch.Tensor | None = None, num_kv_heads: int = 2, **options: Any
) -> torch.Tensor:
    """One call as a model makes it: two tokens, one layer, window 8."""
    inputs = pack_step([Part([1, 2], 0, 2, [0])], BLOCK_SIZE)
    kv = KvTensors(
        (LayerKv(num_kv_heads, 8, 8, window=8),), 1, BLOCK_SIZE, torch.float32, torch.device("cpu")
    )
    context = AttentionContext(inputs, kv, CpuAttention())
    query, key, value = (torch.randn(1, heads, 2, 8) for heads in (4, num_kv_heads, num_kv_heads))
    keywords: dict[str, Any] = {"slipstream_context": context, "scaling": 0.5, "sliding_window": 8} | options
    layer: Any = module or SimpleNamespace(layer_idx=0)
    output, weights = paged_attention(layer, query, key, value, mask, **keywords)
    assert weights is None
    return output


@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_what_is_attended_may_be_viewed_in_any_shape(num_kv_heads: int) -> None:
    assert call_attention(num_kv_heads=num_kv_heads).view(1, 2, 2, 16).shape == (1, 2, 2, 16)


@pytest.mark.parametrize("name", ["position_bias", "alibi", "head_mask", "indices", "something_new"])
def test_an_argument_it_does_not_know_is_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(1)}
    absent: dict[str, Any] = {name: None}
    with pytest.raises(UnsupportedModel, match=name):
        call_attention(**given)
    assert call_attention(**absent).shape == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "drops out"),
        ({"is_causal": False}, "later tokens"),
        ({"module": SimpleNamespace(layer_idx=0, is_causal=False)}, "later tokens"),
        ({"mask": torch.zeros(1, 1, 2, 2)}, "attention_mask"),
        ({"slipstream_context": None}, "keywords"),
        ({"sliding_window": None}, "sliding_window None"),
        ({"sliding_window": 9}, "sliding_window 9"),
        ({"module": SimpleNamespace(layer_idx=1)}, "layer_idx 1"),
        ({"module": SimpleNamespace(layer_idx=-1)}, "layer_idx -1"),
        ({"module": SimpleNamespace()}, "layer_idx None"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_it_cannot_honour_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        call_attention(**options)


def test_arguments_that_change_nothing_are_accepted() -> None:
    output = call_attention(
        dropout=0.0,
        is_causal=True,
        position_ids=torch.tensor([[0, 1]]),
        cache_position=torch.tensor([0, 1]),
        output_attentions=False,
        use_cache=False,
        softcap=None,
    )
    assert output.shape == (1, 2, 4, 8)


def test_the_scale_defaults_to_the_usual_one() -> None:
    torch.manual_seed(0)
    default = call_attention(scaling=None)
    torch.manual_seed(0)
    torch.testing.assert_close(default, call_attention(scaling=8**-0.5))


def test_registering_twice_is_registering_once() -> None:
    register()
    register()
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention


@pytest.mark.parametrize("make_mask", [create_causal_mask, create_sliding_window_causal_mask])
def test_transformers_builds_no_mask_for_us(make_mask: Callable[..., torch.Tensor | None]) -> None:
    loaded = load_tiny("mistral")
    loaded.model.set_attn_implementation(ATTENTION_NAME)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    hidden = torch.zeros(1, 5, 64)
    assert make_mask(loaded.model.config, hidden, None, past_key_values=None, position_ids=positions) is None


# --- blocks ---


class Pool:
    """Two sequences of one model stepped by hand over blocks that the test chooses."""

    def __init__(self, family: str, backend: AttentionBackend, num_blocks: int = 12) -> None:
        self.loaded = load_tiny(family)
        self.forward: PackedForward = packed_forward(self.loaded, backend)
        self.kv = self.forward.make_kv(num_blocks, BLOCK_SIZE)

    @torch.inference_mode()
    def step(
        self, *parts: Part, copies: tuple[BlockCopy, ...] = (), scrub: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """The logits of every token of `parts`."""
        inputs = pack_step(parts, BLOCK_SIZE, every_row=True)
        self.kv.scrub_blocks(scrub)
        self.kv.copy_blocks(copies)
        return self.forward(inputs, self.kv)

    @torch.inference_mode()
    def poison(self, *blocks: int) -> None:
        """What a request with non-finite values leaves behind."""
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor[list(blocks)] = torch.nan


def assert_logits(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


FAMILIES = ["llama", "mistral", "gemma2", "gpt2"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbours_nan_stays_with_the_neighbour(family: str, backend: AttentionBackend) -> None:
    """Also where it lies in block 0, which unused table entries name, and is far longer."""
    rng = np.random.default_rng(0)
    pool = Pool(family, backend)
    sick, sound = random_tokens(rng, 30), random_tokens(rng, 7)
    sick_blocks, sound_blocks = [0, 3, 4, 5, 6, 7, 8, 9], [2, 1]
    pool.step(Part(sick, 0, 26, sick_blocks), Part(sound, 0, 3, sound_blocks))
    pool.poison(*sick_blocks)
    expected = plain_logits(pool.loaded, sound)
    pool.forward = packed_forward(pool.loaded, backend)
    both = pool.step(Part(sick, 26, 28, sick_blocks), Part(sound, 3, 5, sound_blocks))
    assert both[:2].isnan().all()
    assert_logits(both[2:], expected[3:5])
    both = pool.step(Part(sound, 5, 6, sound_blocks), Part(sick, 28, 29, sick_blocks))
    assert_logits(both[:1], expected[5:6])
    assert both[1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scrubbed", [True, False])
def test_a_poisoned_block_is_safe_to_reuse(backend: AttentionBackend, scrubbed: bool) -> None:
    rng = np.random.default_rng(1)
    pool = Pool("llama", backend)
    tokens, other = random_tokens(rng, 6), random_tokens(rng, 14)
    expected = plain_logits(pool.loaded, tokens)
    pool.forward = packed_forward(pool.loaded, backend)
    pool.poison(3, 5)
    logits = pool.step(
        Part(tokens, 0, 5, [5, 3]), Part(other, 0, 13, [1, 2, 6, 7]), scrub=(3, 5) if scrubbed else ()
    )
    assert_logits(logits[:5], expected[:5])
    logits = pool.step(Part(tokens, 5, 6, [5, 3]), Part(other, 13, 14, [1, 2, 6, 7]))
    assert_logits(logits[:1], expected[5:])


@pytest.mark.by_default
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "layer", [LayerKv(2, 16, 16), LayerKv(2, 16, 12, window=20), LayerKv(1, 16, 16, chunk=20)]
)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_is_not_finite_shows_in_no_token_that_does_not_see_it(
    backend: AttentionBackend, number: float, layer: LayerKv, softcap: float | None
) -> None:
    """A draft that is refused changes nothing before it, in its branch or beside it."""
    noise = Noise(DRAFTS, layer, softcap=softcap)
    check_what_shows(noise, backend, torch.device("cpu"), number)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stale_numbers_in_own_blocks_are_never_seen(backend: AttentionBackend) -> None:
    rng = np.random.default_rng(2)
    pool = Pool("gemma2", backend)
    before, after, other = random_tokens(rng, 16), random_tokens(rng, 11), random_tokens(rng, 15)
    pool.step(Part(before, 0, 16, [4, 5, 6, 7]))
    expected = plain_logits(pool.loaded, after)
    pool.forward = packed_forward(pool.loaded, backend)
    logits = pool.step(Part(after, 0, 9, [7, 5, 4]), Part(other, 0, 14, [0, 1, 2, 3]))
    assert_logits(logits[:9], expected[:9])
    logits = pool.step(Part(after, 9, 10, [7, 5, 4]), Part(other, 14, 15, [0, 1, 2, 3]))
    assert_logits(logits[:1], expected[9:10])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copied_block_goes_its_own_way(family: str, backend: AttentionBackend) -> None:
    """Two continuations of one prefix: full blocks shared, the open one copied before it is written."""
    rng = np.random.default_rng(3)
    pool = Pool(family, backend)
    prefix = random_tokens(rng, 10)
    left, right = prefix + random_tokens(rng, 4), prefix + random_tokens(rng, 4)
    expected = [plain_logits(pool.loaded, tokens)[10:] for tokens in (left, right)]
    pool.forward = packed_forward(pool.loaded, backend)
    pool.step(Part(left, 0, 10, [4, 2, 9]))
    left_blocks, right_blocks = [4, 2, 9, 0], [4, 2, 7, 1]
    logits = [
        pool.step(
            Part(left, first, first + 1, left_blocks),
            Part(right, first, first + 1, right_blocks),
            copies=(BlockCopy(9, 7),) if first == 10 else (),
        )
        for first in range(10, 14)
    ]
    for row in (0, 1):
        assert_logits(torch.stack([step[row] for step in logits]), expected[row])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rewound_sequence_overwrites_what_was_rejected(backend: AttentionBackend) -> None:
    rng = np.random.default_rng(4)
    pool = Pool("mistral", backend)
    tokens = random_tokens(rng, 16)
    wrong = tokens[:10] + random_tokens(rng, 6)
    expected = plain_logits(pool.loaded, tokens)
    pool.forward = packed_forward(pool.loaded, backend)
    pool.step(Part(wrong, 0, 10, [3, 1, 0, 2]))
    pool.step(Part(wrong, 10, 16, [3, 1, 0, 2]))
    assert_logits(pool.step(Part(tokens, 10, 13, [3, 1, 0, 2])), expected[10:13])
    assert_logits(pool.step(Part(tokens, 13, 14, [3, 1, 0, 2])), expected[13:14])
