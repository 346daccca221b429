"""Attention one sequence at a time, as plainly as it can be said: what other backends are tested against."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.compute.attention.backend import LayerCall
from engine.compute.attention.kv_tensors import KvTensors
from engine.compute.attention.kv_writer import KvWriter
from engine.compute.attention.layer_kv import Reach
from engine.compute.attention.tree_mask import TreeMask, tree_masks
from engine.plan.step_records import StepInputs


class ReferenceAttention:
    """Gathers each sequence's keys and values and attends with a full mask; runs on any device."""

    def plan(self, inputs: StepInputs, kv: KvTensors) -> ReferenceStep:
        """The sequences with their block tables on the device."""
        sequences, start = [], 0
        trees = tree_masks(inputs)
        tables = torch.tensor(inputs.block_tables, device=kv.device, dtype=torch.long)
        for row, (query_len, kv_len) in enumerate(
            zip(inputs.query_lens.tolist(), inputs.kv_lens.tolist(), strict=True)
        ):
            num_blocks = -(-kv_len // kv.block_size)
            newest = inputs.positions[start : start + query_len]
            sequences.append(_Sequence(start, newest, kv_len, tables[row, :num_blocks], trees.get(row)))
            start += query_len
        return ReferenceStep(inputs, kv, sequences)


@dataclass(slots=True)
class _Sequence:
    """Tokens [start, start + query_len) of the packed row; they are its newest of `kv_len`."""

    start: int
    newest: NDArray[np.int64]  # where they are: [query_len]
    kv_len: int
    blocks: torch.Tensor  # [num_blocks]
    tree: TreeMask | None  # what the tokens are, if they are no chain
    masks: dict[Reach | None, torch.Tensor] = field(default_factory=dict)

    @property
    def query_len(self) -> int:
        """How many of its tokens are in the row."""
        return len(self.newest)

    def positions(self) -> torch.Tensor:
        """Where its tokens are: int64 [kv_len]. Drafts of a tree may be at the same place."""
        before = np.arange(self.kv_len - self.query_len)
        return torch.from_numpy(np.concatenate((before, self.newest))).to(self.blocks.device)

    def mask(self, reach: Reach | None) -> torch.Tensor:
        """True where a query token may look: [query_len, kv_len]."""
        if reach not in self.masks:
            allowed = self._causal(reach) if self.tree is None else self._branching(self.tree, reach)
            self.masks[reach] = torch.from_numpy(allowed).to(self.blocks.device)
        return self.masks[reach]

    def _causal(self, reach: Reach | None) -> NDArray[np.bool_]:
        keys = np.arange(self.kv_len)
        queries = keys[-self.query_len :, None]
        allowed: NDArray[np.bool_] = keys <= queries
        return allowed if reach is None else allowed & (keys >= reach.first(queries))

    def _branching(self, tree: TreeMask, reach: Reach | None) -> NDArray[np.bool_]:
        newest = self.kv_len - self.query_len
        places = np.arange(-newest, self.query_len)
        return tree.sees(places[-self.query_len :], places, reach, newest)


class ReferenceStep:
    """One step of the reference backend."""

    def __init__(self, inputs: StepInputs, kv: KvTensors, sequences: list[_Sequence]) -> None:
        self._kv = kv
        self._writer = KvWriter(inputs, kv)
        self._sequences = sequences

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See StepAttention."""
        self._writer.write(layer, key, value)

    def attend(self, query: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """See StepAttention."""
        output = query.new_empty(*query.shape[:2], self._kv.layers[call.layer].value_dim)
        for sequence in self._sequences:
            rows = slice(sequence.start, sequence.start + sequence.query_len)
            key, value = (
                _positions(blocks, sequence) for blocks in self._kv.read(call.layer, sequence.blocks)
            )
            mask = sequence.mask(call.reach)
            if call.bias is not None:
                mask = call.bias.at(sequence.positions())[:, None].masked_fill(~mask, float("-inf"))
            output[rows] = attend_sequence(query[rows], key, value, mask, call)
        return output


def attend_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, call: LayerCall
) -> torch.Tensor:
    """Masked attention of one sequence: `query` [T, heads, dim], `key` and `value` [K, kv heads, dim].

    `mask` is True where a query may look, [T, K], or what is added to the scores, [heads, T, K]. What is not
    finite shows in the queries that see it, and in no other: it takes no part in the products of those.
    """
    broken = ~(key.isfinite().all((1, 2)) & value.isfinite().all((1, 2)))  # [K]
    key, value = (each.masked_fill(broken[:, None, None], 0.0) for each in (key, value))
    seen = mask if mask.dtype is torch.bool else mask[0] > float("-inf")
    sick = (seen & broken).any(-1)  # [T]
    return _attended(query, key, value, mask, call).masked_fill(sick[:, None, None], torch.nan)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, call: LayerCall
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    query = query.transpose(0, 1)  # [heads, T, dim]
    key = key.transpose(0, 1).repeat_interleave(group, dim=0)  # [heads, K, dim]
    value = value.transpose(0, 1).repeat_interleave(group, dim=0)
    if call.softcap is None and call.sinks is None and call.bias is None:
        attended = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=call.scaling
        )[0]
    else:
        scores = query.float() @ key.float().transpose(1, 2) * call.scaling  # [heads, T, K]
        if call.softcap is not None:
            scores = (scores / call.softcap).tanh() * call.softcap
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        if call.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = call.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)  # [heads, T, 1]
            weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        attended = (weights @ value.float()).to(query.dtype)
    return attended.transpose(0, 1)  # [T, heads, dim]


def _positions(blocks: torch.Tensor, sequence: _Sequence) -> torch.Tensor:
    """The sequence's blocks [num_blocks, kv heads, block size, dim] as [kv_len, kv heads, dim]."""
    return blocks.transpose(1, 2).flatten(0, 1)[: sequence.kv_len]
