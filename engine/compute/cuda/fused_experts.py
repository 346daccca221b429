"""FusedExperts: a mixture's experts in two to four launches, whose sizes follow from the number of rows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import nn

from engine.compute.cuda.expert_kernels import (
    expert_down_kernel,
    expert_gate_kernel,
    expert_sum_kernel,
    route_kernel,
)
from engine.compute.cuda.expert_layout import (
    ExpertLayout,
    ExpertShape,
    layout_for,
    rows_of_each_layout,
    step_of,
)
from engine.compute.cuda.fused_norms import ExpertAnswers
from engine.compute.native.closeness import is_close
from engine.compute.native.families import (
    has_limited_experts,
    has_read_experts,
    has_shapes_of_experts,
    has_ungated_experts,
    weights_of_experts,
)
from engine.compute.native.modules import activation_of
from engine.compute.native.observation import Seen
from engine.compute.native.places import is_unhooked
from engine.compute.native.records import Activation

_SORTED = 1024  # pairs that a program sorts at a time
_SUMMED = 1024  # outputs that a program sums
_ALIGNED = 4  # words: where tensors begin on their multiples, Triton compiles for such addresses alone


class Routes(NamedTuple):
    """The pairs of rows and experts in tiles of a layout: what `route_kernel` writes.

    Where pairs are found and not sorted nothing is written, and `order` and `tiles` are not read.
    """

    chosen: torch.Tensor  # [rows, each]
    order: torch.Tensor  # int32 [pairs]
    tiles: torch.Tensor  # int32 [tiles, 3]


class Shared(NamedTuple):
    """Weights of experts that all rows go through, as of one that is as wide as all of them."""

    gate_up: torch.Tensor  # [2 * num_shared * width, hidden], gates first
    down: torch.Tensor  # [hidden, num_shared * width]


class FusedExperts(nn.Module):
    """The experts of `original`, equal to them up to rounding: down(act(gate(x)) * up(x)) by shares summed.

    `act` is SiLU, GELU, its approximation by tanh or the square of ReLU. Or they have no gates, and answer
    down(act(up(x))), or gpt-oss's biases and limits. No call waits for the device, so that a CUDA graph can
    hold it. Up to FEW_ROWS rows have the same bits in any company: they are multiplied in tiles of one size,
    and each one's answers are summed in float32, in the order in which it chose.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        weights = _read(original)
        self.gate_up_proj, self.down_proj = weights.gate_up, weights.down
        self.gate_up_bias, self.down_bias = weights.gate_up_bias, weights.down_bias
        self.shape = weights.shape
        self.shared: Shared | None = None

    def with_shared(self, gate_up: nn.Module, down: nn.Module, activation: Activation) -> FusedExperts | None:
        """They and, numbered behind them, those that an MLP is, which all rows go through.

        None unless it is as wide as some of them together, and activated as they are. Its weights stay.
        """
        shape = self.shape
        if type(gate_up) is not nn.Linear or type(down) is not nn.Linear or gate_up.bias is not None:
            return None
        num_shared, rest = divmod(down.in_features, shape.width)
        if rest or not shape.is_gated or shape.is_limited or activation != shape.activation:
            return None
        made = copy.copy(self)
        made.shape = replace(shape, num_shared=num_shared)
        made.shared = Shared(gate_up.weight, down.weight)
        return made

    @staticmethod
    def fits(original: Any, dtype: torch.dtype) -> bool:
        """True for experts that can be computed; their output is still to be compared.

        Those whose weights are codes are of no class that was read.
        """
        if not has_read_experts(original) or not all(map(is_unhooked, original.modules())):
            return False
        if not has_limited_experts(original) and activation_of(original.act_fn) is None:
            return False
        return has_shapes_of_experts(original, dtype)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[N, hidden] to the same; chosen experts and their shares are [N, each].

        A number that no expert has is left out.
        """
        if not len(hidden_states):
            return torch.empty_like(hidden_states)
        return summed(self.answered(hidden_states, top_k_index, top_k_weights))

    def answered(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        to_shared: torch.Tensor | None = None,
    ) -> ExpertAnswers:
        """The same before it is summed, which is a launch less; of a row at least.

        Where those that all rows go through are given others, these are `to_shared`.
        """
        rows, chosen, shares = (each.contiguous() for each in (hidden_states, top_k_index, top_k_weights))
        count, each = chosen.shape
        layout = layout_for(count, each, self.shape)
        routes = route(chosen, layout, self.shape.num_experts)
        activated = self._activated(rows, rows if to_shared is None else to_shared, routes, layout)
        answers = self._answers(activated, routes, layout).view(count, each, -1)
        return ExpertAnswers(answers, chosen, shares, self.shape.num_experts, self.shape.num_shared)

    def _activated(
        self, rows: torch.Tensor, to_shared: torch.Tensor, routes: Routes, layout: ExpertLayout
    ) -> torch.Tensor:
        """What goes through the second product, [pairs, width] as these are sorted, or by their numbers."""
        shape, num_pairs = self.shape, routes.chosen.numel()
        num_tiles = layout.num_tiles(num_pairs, shape.num_experts)
        activated = rows.new_empty(num_pairs, shape.width)
        expert_gate_kernel[(num_tiles * triton.cdiv(shape.width, layout.outs // shape.num_first),)](
            rows,
            to_shared,
            self.gate_up_proj,
            self.gate_up_proj if self.shared is None else self.shared.gate_up,
            self.gate_up_proj if self.gate_up_bias is None else self.gate_up_bias,
            *routes,
            activated,
            num_tiles,
            EACH=routes.chosen.shape[1],
            SHAPE=shape,
            LAYOUT=layout,
            STEP=step_of(shape.hidden, rows.itemsize, layout),
            num_warps=layout.num_warps,
            num_stages=layout.num_stages,
        )
        return activated

    def _answers(self, activated: torch.Tensor, routes: Routes, layout: ExpertLayout) -> torch.Tensor:
        """What experts answer, [pairs, hidden] by the pairs' numbers."""
        shape = self.shape
        num_tiles = layout.num_tiles(len(activated), shape.num_experts)
        answers = activated.new_empty(len(activated), shape.hidden)
        expert_down_kernel[(num_tiles * triton.cdiv(shape.hidden, layout.outs),)](
            activated,
            self.down_proj,
            self.down_proj if self.shared is None else self.shared.down,
            self.down_proj if self.down_bias is None else self.down_bias,
            *routes,
            answers,
            num_tiles,
            SHAPE=shape,
            LAYOUT=layout,
            STEP=step_of(shape.width, activated.itemsize, layout),
            num_warps=layout.num_warps,
            num_stages=layout.num_stages,
        )
        return answers


def route(chosen: torch.Tensor, layout: ExpertLayout, count: int) -> Routes:
    """The pairs of `chosen` [N, each], of `count` experts, in tiles of a layout, in one launch or none."""
    if layout.most_found:
        return Routes(chosen, chosen, chosen)
    num_pairs = chosen.numel()
    num_tiles = layout.num_tiles(num_pairs, count)
    first = triton.cdiv(num_pairs, _ALIGNED) * _ALIGNED
    words = torch.empty(first + 3 * num_tiles, dtype=torch.int32, device=chosen.device)
    routes = Routes(chosen, words[:num_pairs], words[first:].view(num_tiles, 3))
    route_kernel[(count,)](*routes, num_pairs, num_tiles, COUNT=count, ROWS=layout.rows, CHUNK=_SORTED)
    return routes


@torch.inference_mode()
def equal_experts(original: Any, seen: Seen, dtype: torch.dtype) -> FusedExperts | None:
    """The experts fused; None unless they repeat what those were seen to answer, in every layout.

    For layouts of more rows than were seen these are repeated. Raises whatever a compiler or driver does.
    """
    given = seen.given
    if given is None or given.dtype is not dtype or len(seen.args) != 3 or seen.options:
        return None
    made = FusedExperts(original)
    _, chosen, _ = seen.args
    counts = (len(given), *rows_of_each_layout(chosen.shape[1], made.shape))
    for count in counts:
        args = (repeated(each, count) for each in seen.args)
        if not is_close(made(*args), repeated(seen.output, count)):
            return None
    return made


def repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows, these from the first one on and again."""
    return rows.repeat(triton.cdiv(count, len(rows)), 1)[:count]


def summed(of: ExpertAnswers) -> torch.Tensor:
    """Each row's answers by its shares, [N, hidden], in one launch."""
    count, each, hidden = of.answers.shape
    total = of.answers.new_empty(count, hidden)
    chunk = min(_SUMMED, triton.next_power_of_2(hidden))
    chunks = triton.cdiv(hidden, chunk)
    expert_sum_kernel[(count * chunks,)](
        of.answers,
        of.chosen,
        of.shares,
        total,
        COUNT=of.num_experts,
        EACH=each,
        HIDDEN=hidden,
        CHUNKS=chunks,
        CHUNK=chunk,
    )
    return total


class _Weights(NamedTuple):
    """Experts' weights as the kernels read them: gates before ups, inputs next to one another."""

    gate_up: nn.Parameter  # [count, 2 * width, hidden], or [count, width, hidden] without gates
    down: nn.Parameter  # [count, hidden, width]
    gate_up_bias: nn.Parameter | None  # [count, 2 * width]
    down_bias: nn.Parameter | None  # [count, hidden]
    shape: ExpertShape


def _read(original: Any) -> _Weights:
    """The weights of experts: their own, but gpt-oss's, which are laid out anew."""
    if not has_limited_experts(original):
        gate_up, down = (_frozen(weight.contiguous()) for weight in weights_of_experts(original))
        activation = activation_of(original.act_fn)
        assert activation is not None, "only experts that fit are asked for"
        count, hidden, width = down.shape
        is_gated = not has_ungated_experts(original)
        shape = ExpertShape(count, hidden, width, activation=activation, is_gated=is_gated)
        return _Weights(gate_up, down, None, None, shape)
    gate_up, gate_up_bias = (
        _frozen(torch.cat((by_turns[:, ::2], by_turns[:, 1::2]), dim=1))
        for by_turns in (original.gate_up_proj.mT, original.gate_up_proj_bias)
    )
    down, down_bias = _frozen(original.down_proj.mT.contiguous()), _frozen(original.down_proj_bias)
    count, hidden, width = down.shape
    shape = ExpertShape(count, hidden, width, float(original.alpha), float(original.limit))
    return _Weights(gate_up, down, gate_up_bias, down_bias, shape)


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)
