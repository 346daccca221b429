"""Attention over a row of whole texts: each token attends to its own text, all of it or what came before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.compute.embedding.texts import Group, TextBatch
from engine.errors import UnsupportedModel

ATTENTION_NAME = "slipstream_texts"
BATCH_KEYWORD = "slipstream_batch"

UNIT_FLOP = 2e9  # of one piece of work: about ten milliseconds on two cores
_HARMLESS = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "deterministic", "return_dict"}
)


def register() -> None:
    """Make it known to transformers; calling it again changes nothing. No mask is built for it."""
    AttentionInterface.register(ATTENTION_NAME, attend_to_texts)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which tokens of its text one attends to: not later ones if `causal`, none as far as `window` away."""

    causal: bool
    window: int | None
    scaling: float | None


def attend_to_texts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Shapes as transformers' attention functions have them, of one row: [1, heads, num_tokens, dim].

    Needs the keyword `slipstream_batch`. Raises UnsupportedModel for what it would not compute exactly.
    """
    batch, rule = _read(module, attention_mask, options)
    output = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    for group in batch.groups:
        q, k, v = (_taken(rows[0], group) for rows in (query, key, value))
        for first, part in _attended(q, k, v, rule, group):
            _put(output, part, group, first)
            batch.give_way()
    return output[None], None


def _read(module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> tuple[TextBatch, _Rule]:
    batch = options.pop(BATCH_KEYWORD, None)
    causal = options.pop("is_causal", None)
    rule = _Rule(
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        window=options.pop("sliding_window", None),
        scaling=options.pop("scaling", None),
    )
    foreign = [
        name
        for name, value in options.items()
        if name not in _HARMLESS and value is not None and value is not False and value != 0
    ]
    if batch is None or mask is not None or foreign:
        raise UnsupportedModel(f"{type(module).__name__} attends in a way of its own ({foreign}).")
    return batch, rule


def _taken(rows: Tensor, group: Group) -> Tensor:
    """A group's part of [heads, num_tokens, dim], as [num_texts, heads, longest, dim]."""
    heads, _, dim = rows.shape
    part = rows[:, group.start : group.end] if group.gather is None else rows[:, group.gather]
    return part.reshape(heads, group.num_texts, group.longest, dim).transpose(0, 1)


def _put(output: Tensor, part: Tensor, group: Group, first: int) -> None:
    """Write [num_texts, heads, rows, dim] of queries from `first` on to their places in the row."""
    rows = part.transpose(1, 2)  # [num_texts, rows, heads, dim]
    if group.scatter is not None:
        output[group.start : group.end] = rows.flatten(0, 1)[group.scatter]
    elif group.num_texts == 1:
        output[group.start + first : group.start + first + rows.shape[1]] = rows[0]
    else:
        output[group.start : group.end] = rows.flatten(0, 1)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, rule: _Rule, group: Group
) -> Iterator[tuple[int, Tensor]]:
    """What the queries find, with the first of them: all at once, or a long text's in pieces."""
    longest = group.longest
    step = longest
    if group.num_texts == 1:
        flop_a_row = 4 * query.shape[1] * longest * query.shape[3]
        step = max(16, min(longest, int(UNIT_FLOP / flop_a_row)))
    for first in range(0, longest, step):
        part = query[:, :, first : first + step]
        mask = _mask(rule, group, first, part.shape[2], query.device)
        yield (
            first,
            scaled_dot_product_attention(
                part,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None and rule.causal,
                scale=rule.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            ),
        )


def _mask(rule: _Rule, group: Group, first: int, num_rows: int, device: torch.device) -> Tensor | None:
    """True where a query may look; None where it may look anywhere, or at all up to itself.

    Padding lies behind a text's last token, where a causal query does not look.
    """
    longest = group.longest
    is_windowed = rule.window is not None and rule.window < longest
    if rule.causal and not is_windowed and num_rows == longest:
        return None
    allowed = None
    if rule.causal or is_windowed:
        rows = torch.arange(first, first + num_rows, device=device)[:, None]
        distance = rows - torch.arange(longest, device=device)[None]
        allowed = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
        if rule.window is not None:
            allowed &= distance.abs() < rule.window
        allowed = allowed[None, None]
    if group.is_real is not None and not rule.causal:
        real = group.is_real[:, None, None]
        allowed = real if allowed is None else allowed & real
    return allowed
