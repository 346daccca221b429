"""How much memory the kernels work in beside weights, K/V and the tensors that they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.compute.attention.layer_kv import LayerKv
from engine.compute.loading.loader import LoadedModel

TILE_ROWS = 96  # as tiles.h has it
MAX_GROUP = 128  # query heads a KV head, which one tile holds
_FLOAT_BYTES = 4
_PANEL = 32
_KEYS = 64
_RECORDS_EACH = 16  # tiles' worth for each thread in a round: beside its work, the end of a round is nothing


def record_numbers(dim: int, num_threads: int) -> int:
    """Numbers for records of chunks, of heads of `dim`; none where one thread does it all.

    However long a context is, a team works on so much of it at a time.
    """
    return 0 if num_threads == 1 else num_threads * _RECORDS_EACH * TILE_ROWS * _record(dim)


def attention_bytes(layers: Sequence[LayerKv], num_threads: int) -> int:
    """The most that attention takes: records, and for each thread what it attends with."""
    dim = max((layer.key_dim for layer in layers), default=0)
    rows = max(TILE_ROWS, MAX_GROUP)
    each = 2 * rows * _record(dim) + (2 * _KEYS + rows) * dim
    return _FLOAT_BYTES * (record_numbers(dim, num_threads) + num_threads * each)


def layer_numbers(config: Any, layers: Sequence[LayerKv]) -> int:
    """Numbers for each token, and between the parts of the layer that needs most, as decoder.h has them."""
    heads = config.num_attention_heads
    attention = max((3 * heads + 2 * layer.num_kv_heads) * layer.key_dim for layer in layers)
    width = config.intermediate_size * (2 if getattr(config, "use_double_wide_mlp", False) else 1)
    kept = 2 if getattr(config, "enable_moe_block", False) else 1  # what an MLP beside a mixture makes
    return int((1 + kept) * config.hidden_size + max(attention, width, _mixture_numbers(config)))


def _mixture_numbers(config: Any) -> int:
    """Those of a mixture in an MLP's place, as mixture.h has them; 0 for a model without any."""
    each = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    hidden = config.hidden_size
    if not each or not count:
        return 0
    logits = -(-count // _PANEL) * _PANEL
    more = bool(shared) + hasattr(config, "top_k_experts")  # what the shared expert makes, or is routed
    return int(logits + each * hidden + max(each * width, shared) + (1 + more) * hidden)


def kept_numbers(needed: int) -> int:
    """How many are allocated where that many are needed: larger steps do not come one token at a time."""
    return 1 << max(0, needed - 1).bit_length()


def scratch_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """The most for steps of so many tokens; 0 for a model for which the kernels do not attend."""
    if loaded.row_attention is None or loaded.team is None:
        return 0
    if loaded.kernels is None:
        return attention_bytes(loaded.layers, loaded.team.size)
    return foreseen_bytes(loaded, loaded.team.size, num_tokens)


def foreseen_bytes(outline: LoadedModel, num_threads: int, num_tokens: int) -> int:
    """The same for a model of which only its shape is known, on so many threads."""
    each = layer_numbers(outline.config, outline.layers)
    layer_bytes = outline.dtype.itemsize * kept_numbers(num_tokens * each)
    return attention_bytes(outline.layers, num_threads) + layer_bytes


def _record(dim: int) -> int:
    """Sums, the total and the largest score of a row; see attention_tile.h."""
    return dim + 32
